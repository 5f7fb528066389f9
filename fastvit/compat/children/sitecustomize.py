"""Python's own start-up hook, in the processes that a program with the look-alikes starts.

`install` puts this folder into their PYTHONPATH. Only the standard library is imported here, since most of
them import neither apex nor torch.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location

here = os.path.dirname(os.path.abspath(__file__))
compat = os.path.dirname(here)
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # as without this hook


class AfterTorch:
    """The finder that does what `--cpu` asks for once torch is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(AfterTorch)
        spec = find_spec(name)
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import_module("fastvit.compat._cpu").install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if prefer := os.environ.get("FASTVIT_COMPAT"):
    # By their own names, so that a later import of the package finds them with their state; without the
    # package, which imports torch.
    for name in ("_finder", "_local_rank"):
        spec = spec_from_file_location(f"fastvit.compat.{name}", os.path.join(compat, f"{name}.py"))
        assert spec and spec.loader
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    if PathFinder.find_spec("fastvit") is None:
        sys.path.append(os.path.dirname(os.path.dirname(compat)))
    sys.modules["fastvit.compat._finder"].install(prefer)
    sys.modules["fastvit.compat._local_rank"].spell_local_rank()
    if os.environ.get("FASTVIT_COMPAT_CPU"):
        sys.meta_path.insert(0, AfterTorch)

if spec := PathFinder.find_spec("sitecustomize"):  # the one in whose place this one came
    sys.modules["sitecustomize"] = module_from_spec(spec)
    assert spec.loader
    spec.loader.exec_module(sys.modules["sitecustomize"])
