"""Messages and exit codes of the command line: errors as a sentence, results as text or JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from l0prune.doors import missing
from l0prune.errors import L0pruneError, L0pruneWarning, StoppedElsewhere, UsageError
from l0prune.progress.launched import is_first_process
from l0prune.progress.stages import Stage, watched

# stdout is for results only; all other messages go to stderr.
out = Console()
err = Console(stderr=True)

DONE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED = 130  # also the value that typer returns after Ctrl-C without ``standalone_mode``

_STOPPED = "stopped. The same command goes on from the last checkpoint, if it wrote one."


def run_command(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code, with a message for any error."""
    try:
        if command() == INTERRUPTED:
            raise KeyboardInterrupt
    except typer.Exit as stop:
        return int(stop.exit_code)
    except StoppedElsewhere:
        return FAILED  # the process that failed first has reported the reason
    except UsageError as error:
        # Before torch is loaded only arguments are looked at, which all processes have.
        if "torch" in sys.modules or is_first_process():
            complain(str(error))
        return WRONG_USE
    except L0pruneError as error:
        complain(str(error))
        return FAILED
    except (KeyboardInterrupt, typer.Abort) as stop:
        if is_first_process():
            complain(str(stop) or _STOPPED)
        return 128 + getattr(stop, "signal", signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        complain("out of memory. A smaller --batch-size or a smaller --input may fit.")
        return FAILED
    except Exception as error:
        # An error about options; by version the class is click's or typer's.
        show = getattr(error, "show", None)
        if show is not None and hasattr(error, "exit_code"):
            option = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
            complain(sentence) if (sentence := missing(option)) else show()
            return WRONG_USE
        unexpected(error)
        return FAILED
    return DONE


@contextmanager
def own_warnings() -> Iterator[None]:
    """Print each warning of l0prune once within the context, and none of other libraries."""
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
    """Print an error message on stderr, without markup, since paths may hold brackets."""
    err.print("[bold red]error:[/] ", end="")
    say(text)


def unexpected(error: Exception) -> None:
    """Print an unexpected error in one line, with the traceback only if L0PRUNE_DEBUG is set."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    complain(f"{type(error).__name__}: {error} ({place}). L0PRUNE_DEBUG=1 shows the whole trace.")
    if os.environ.get("L0PRUNE_DEBUG"):
        err.print_exception()


def say(text: str) -> None:
    """Print a message on stderr, with control characters replaced."""
    plain = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    err.print("".join(plain), markup=False, highlight=False, soft_wrap=True)


def emit(result: dict[str, Any], as_json: bool, show: Any) -> None:
    """Print the result on stdout: as JSON, or ``show`` as readable text."""
    if as_json:
        print(json.dumps(result, indent=2))
    elif isinstance(show, str):  # whole lines, and paths may hold brackets
        out.print(show, markup=False, highlight=False, soft_wrap=True)
    else:
        out.print(show)


@contextmanager
def announced(say: Callable[[str], None]) -> Iterator[None]:
    """Call ``say`` with each stage that begins in the context, except parts of another stage."""
    depth = 0

    def tell(stage: Stage) -> None:
        nonlocal depth
        if stage.seconds is None and not depth:
            say(stage.name)
        depth += 1 if stage.seconds is None else -1

    with watched(tell):
        yield
