"""The name by which pickles of converted models know the hook; its calls then have no keyword arguments."""

from . import scope_hooks


class ScopeHook(scope_hooks.ScopeHook):
    """The hook of a model whose pickle has registered it without keyword arguments."""

    def __call__(self, module, args, *result):  # type: ignore[override]
        super().__call__(module, args, {}, *result, depth=2)
