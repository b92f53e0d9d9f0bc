"""Hook a function of verl: when its module is imported, and so that verl sees the same function as before."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import verl
import wrapt

from gtpo_verl.verl_plugin import compat


def when_imported(module: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module of verl when it is imported.

    The import never fails because of the change: what `change` raises becomes one of `compat.load_errors`.
    """

    def change_safely(imported: ModuleType) -> None:
        try:
            change(imported)
        except Exception as error:
            reason = f"this plugin does not fit {module} of verl {verl.__version__} ({type(error).__name__}: {error})"
            compat.load_errors[reason] = None

    wrapt.register_post_import_hook(change_safely, module)


def hook_into(path: str, hook: Callable, module: ModuleType) -> None:
    """Call `hook` in place of `path` in a module of verl.

    What stands there afterwards is still a plain function of that name: it can be copied, and pickled to another
    process of Ray.

    Args:
        path (str): of a function, or of a class and its method, such as `PPOTrainer.fit`.
        hook: called with `proceed`, which calls the function as it was called; for a method with its instance; and, by
            name, with those of the function's arguments that are keyword-only parameters of the hook.

    Raises:
        AttributeError, TypeError: there is no such function, or it does not take the arguments that the hook reads.
    """
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, module)
    function = getattr(owner, name)
    if hasattr(function, "hooked_by_gtpo"):  # already, through another module that has it
        return

    signature = inspect.signature(function)
    parameters_of_hook = inspect.signature(hook).parameters.values()
    keywords = [parameter.name for parameter in parameters_of_hook if parameter.kind is parameter.KEYWORD_ONLY]
    missing = [keyword for keyword in keywords if keyword not in signature.parameters]
    if missing:
        raise TypeError(f"{path} takes no {', '.join(missing)}: ({', '.join(signature.parameters)})")

    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = {keyword: call.arguments[keyword] for keyword in keywords}
        proceed = functools.partial(function, *args, **kwargs)
        if not classes:
            return hook(proceed, **arguments)
        instance = next(iter(call.arguments.values()))  # a method's first parameter
        return hook(proceed, instance, **arguments)

    hooked.hooked_by_gtpo = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)

    # The function is also known where verl defines it, and to modules that verl imports before it loads plugins
    # (VERL_USE_EXTERNAL_MODULES).
    for other in list(sys.modules.values()):
        if type(other) is ModuleType and vars(other).get(name) is function:
            setattr(other, name, hooked)
