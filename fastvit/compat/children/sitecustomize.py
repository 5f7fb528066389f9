"""Python's own start-up hook, in the processes that a program with the look-alikes starts.

`install` puts this folder into their PYTHONPATH. Without `--cpu` only the standard library is imported here,
since most of them import neither apex nor torch.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location

here = os.path.dirname(os.path.abspath(__file__))
compat = os.path.dirname(here)
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # as without this hook


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
    if os.environ.get("FASTVIT_COMPAT_CPU") and find_spec("torch"):  # by `--cpu`
        import_module("fastvit.compat._cpu").install()

if spec := PathFinder.find_spec("sitecustomize"):  # the one that this one hides
    sys.modules["sitecustomize"] = module_from_spec(spec)
    assert spec.loader
    spec.loader.exec_module(sys.modules["sitecustomize"])
