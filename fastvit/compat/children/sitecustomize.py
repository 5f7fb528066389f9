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


def load(spec):
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if prefer := os.environ.get("FASTVIT_COMPAT"):
    if PathFinder.find_spec("fastvit") is None:
        sys.path.append(os.path.dirname(os.path.dirname(compat)))
    # By their own names, so that a later import of the package finds them with their state; without the
    # package, which imports torch.
    load(spec_from_file_location("fastvit.compat._finder", f"{compat}/_finder.py")).install(prefer)
    load(spec_from_file_location("fastvit.compat._local_rank", f"{compat}/_local_rank.py")).spell_local_rank()
    if os.environ.get("FASTVIT_COMPAT_CPU") and find_spec("torch"):  # by `--cpu`
        import_module("fastvit.compat._cpu").install()

if spec := PathFinder.find_spec("sitecustomize"):  # the one that this one hides
    load(spec)
