from collections.abc import Callable
from typing import Any

def attempting(failed: Callable[[Callable[..., Any], Exception], None], /) -> Callable[..., Any]: ...
