"""apex and inplace_abn for scripts that were written for them.

    python -m fastvit.compat script.py args...

runs an unchanged script; `fastvit.compat.install()` does the same for the imports of a running program.
"""

from ._import_hook import install

__all__ = ["install"]
