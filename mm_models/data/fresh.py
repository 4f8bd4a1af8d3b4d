"""Fresh processes for the loader and for examining: from a server that runs no threads of torch or of a device, and that
has imported once what each of them needs. Their imported memory is shared, and starting one takes no seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forkserver() -> ForkServerContext:
    """The context to start them with. A server that runs already stays as it is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mm_models.data.imports"])
    return context
