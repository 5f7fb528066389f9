"""What `import fastvit` and the first conversion change in torch: nothing, and two functions."""

import subprocess
import sys

CHANGED = """
import sys, torch, torch.jit, torch.autograd.graph
before = {
    (name, key): value for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"
    for key, value in list(vars(module).items()) if callable(value)
}
import fastvit
def changed():
    return {f"{name}.{key}" for (name, key), value in before.items()
            if vars(sys.modules[name]).get(key) is not value}
assert not changed(), changed()
fastvit.convert(torch.nn.Linear(4, 4))(torch.ones(2, 4))
assert changed() == {
    "torch.jit._recursive.get_hook_stubs", "torch.autograd.graph.disable_saved_tensors_hooks"
}, changed()
"""


def test_an_import_changes_nothing_of_torch():
    """The first conversion does: both functions raise where there are hooks of a scope."""
    subprocess.run([sys.executable, "-c", CHANGED], check=True, timeout=50)
