"""A hook that torch.compile sees through: code that it compiles is compiled as if the hook were not there.

This is a file of its own because dynamo traces it, alone of all that hooks are made of (`compiling`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def when_eager(original: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """`hooked` in eager code, and `original` where the call is being traced."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return hooked(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # dynamo keeps what it compiled by the code object
    return functools.update_wrapper(call, original)
