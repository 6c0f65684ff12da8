"""The edge: where errors become messages and results become text or JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from l0prune.errors import L0pruneError, L0pruneWarning, StoppedElsewhere, UsageError
from l0prune.running.launcher import is_first_process

# stdout carries results only; whatever else there is to say goes to stderr.
out = Console()
err = Console(stderr=True)

DONE, FAILED, WRONG_USE = 0, 1, 2
_INTERRUPTED = 130  # what typer, asked not to exit by itself, returns after Ctrl-C


def run_command(command: Callable[[], Any]) -> int:
    """Run a command; the exit code, with a message for whatever goes wrong."""
    try:
        if command() == _INTERRUPTED:
            raise KeyboardInterrupt
    except typer.Exit as stop:
        return int(stop.exit_code)
    except StoppedElsewhere:
        return FAILED  # the process that failed first has said why
    except UsageError as error:
        complain(str(error))
        return WRONG_USE
    except L0pruneError as error:
        complain(str(error))
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        if is_first_process():
            complain("stopped. The same command goes on from the last checkpoint, if it wrote one.")
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        complain("out of memory. A smaller --batch-size or a smaller --input may fit.")
        return FAILED
    except Exception as error:
        # typer's own complaints about options; the class is click's or typer's, by version
        show = getattr(error, "show", None)
        if show is not None and hasattr(error, "exit_code"):
            show()
            return WRONG_USE
        unexpected(error)
        return FAILED
    return DONE


@contextmanager
def own_warnings() -> Iterator[None]:
    """Within the context, say each warning of l0prune once; those of libraries stay quiet."""
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).removeprefix("l0prune:").split())
        if text not in said and is_first_process():
            said.add(text)
            say(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", L0pruneWarning)
        warnings.showwarning = show
        yield


def complain(text: str) -> None:
    """A message for the user on stderr; no markup, paths may hold brackets."""
    err.print("[bold red]error:[/] ", end="")
    say(text)


def unexpected(error: Exception) -> None:
    """An error that no message was written for: one line, the trace only where asked for."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    complain(f"{type(error).__name__}: {error} ({place}). L0PRUNE_DEBUG=1 shows the whole trace.")
    if os.environ.get("L0PRUNE_DEBUG"):
        err.print_exception()


def say(text: str) -> None:
    """A remark for a person, on stderr, without what a terminal would take for commands."""
    plain = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    err.print("".join(plain), markup=False, highlight=False, soft_wrap=True)


def emit(result: dict[str, Any], as_json: bool, show: Any) -> None:
    """The result on stdout: as JSON, or as ``show`` for people."""
    if as_json:
        print(json.dumps(result, indent=2))
    elif isinstance(show, str):  # whole lines, and paths may hold brackets
        out.print(show, markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(show)
