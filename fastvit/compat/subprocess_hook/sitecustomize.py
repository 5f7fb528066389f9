"""Python's start-up hook for the processes that a program with `fastvit.compat.install` starts.

`install` puts this folder on their PYTHONPATH. Without `--cpu` this module imports only the standard library,
because most of these processes import neither apex nor torch.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location

hook_dir = os.path.dirname(os.path.abspath(__file__))
compat_dir = os.path.dirname(hook_dir)
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != hook_dir]  # undoes PYTHONPATH


def load_module(spec):
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_from_compat(name):
    """Loads a module of fastvit.compat without the package, which imports torch.

    A later import of the package finds the module, with its state, because it has its full name.
    """
    return load_module(spec_from_file_location(f"fastvit.compat.{name}", f"{compat_dir}/{name}.py"))


if prefer := os.environ.get("FASTVIT_COMPAT"):
    if PathFinder.find_spec("fastvit") is None:
        sys.path.append(os.path.dirname(os.path.dirname(compat_dir)))
    load_from_compat("_import_hook").install(prefer)
    load_from_compat("_local_rank").patch_local_rank_parsing()
    if os.environ.get("FASTVIT_COMPAT_CPU") and find_spec("torch"):  # set by `--cpu`
        import_module("fastvit.compat._cuda_on_cpu").install()

if spec := PathFinder.find_spec("sitecustomize"):  # the environment's own hook, which this module hides
    load_module(spec)
