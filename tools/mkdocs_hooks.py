"""Hooks of mkdocs.yml: add pages from outside docs/, resolve links to files, and print the schemas of ops.

In docs/ a link like `../csrc/ops.cpp` works for readers of the repository. On the site the link leads to the
page that is made from the file (results of benchmarks, CONTRIBUTING, CHANGELOG), or becomes plain text. A
link to a missing file is a warning, which fails the strict build.
"""

import logging
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# A file of the repository -> its page on the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = ROOT / "benchmarks/results"
PAGES |= {
    str(path.relative_to(ROOT)): f"results/{path.name}"
    for path in sorted(RESULTS.iterdir())
    if path.suffix in (".md", ".png")
}
# `[text](../target#anchor)`, a link out of docs/
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_OP_OPTIONS = "    options: {show_root_heading: false, show_root_toc_entry: false, show_signature: false}\n"
_log = logging.getLogger("mkdocs.plugins.fastvit")


def read_schemas() -> dict[str, str]:
    """Returns the schema of each op of `fastvit.ops`, from the C++ headers that define them."""
    schemas = {}
    for header in ("batch_norm", "layer_norm", "activation_ops"):
        source = (ROOT / f"csrc/{header}.h").read_text()
        # Some schemas contain a macro, whose string literals are in the lines after its name.
        for name, literals in re.findall(r"#define (\w+) +\\\n((?:.*\\\n)*.*)", source):
            source = source.replace(name, literals)  # also in the #define, harmlessly
        for definition in re.findall(r"m\.def\((.*?)\);", source, re.S):
            schema = "".join(re.findall(r'"([^"]*)"', definition))
            schemas[schema.partition("(")[0]] = schema
    return schemas


def on_files(files, config):
    """Adds the files of PAGES to the site."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Returns the text of a page with resolved links, and with the ops if it is the page of ops."""

    def resolve_link(match: re.Match) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if target in PAGES:
            return f"[{text}]({PAGES[target]}{anchor})"
        if not (ROOT / target).exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        return text

    if page.file.src_uri == "api/ops.md":
        for name, schema in read_schemas().items():
            markdown += f"\n## {name}\n\n```text\n{schema}\n```\n\n::: fastvit.ops.{name}\n{_OP_OPTIONS}"
    if page.file.src_uri.startswith(("api/", "results/")):  # Their links work as they are.
        return markdown
    if page.file.src_uri in PAGES.values():  # CONTRIBUTING and CHANGELOG link from the repository's root.
        return markdown.replace("](docs/", "](")
    return _LINK.sub(resolve_link, markdown)  # The page is at the top of docs/, where paths of PAGES start.
