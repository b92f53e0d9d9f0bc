"""Make a folder of files once, safe against interruption and parallel calls."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from gtpo_verl.run.records import differences, read_record


def make_once(
    out: str | Path,
    settings: dict[str, Any],
    sources: Sequence[str],
    make: Callable[[Path], None],
    record: str,
    files: Iterable[str],
) -> None:
    """Call `make` for the folder `out`, unless it holds what an earlier call made with these settings.

    Everything is written beside `out` and renamed when complete, so a later call never takes an interrupted one for a
    result. Of parallel calls only one makes it. A change of a file of `sources` counts as a change of the settings.

    Args:
        out: a folder of its own: new, empty, or written by an earlier call.
        settings: what decides the result, as JSON has it.
        sources: `__file__` of the modules that decide it too.
        make: writes the files into the folder that it is given.
        record: name of the JSON file for the settings.
        files: names of what may lie in `out` besides.

    Raises:
        ValueError: `out` holds something that is not made here, which the renaming would remove.
    """
    out = Path(out).absolute()
    code = b"".join(Path(source).read_bytes() for source in sources)
    settings = {**settings, "source": hashlib.sha256(code).hexdigest()}
    if _is_made(out / record, settings):
        return
    _refuse_foreign(out, {record, *files})  # before a lock is left beside somebody's folder
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.parent / f".{out.name}.lock"):
        if _is_made(out / record, settings):  # by a call that held the lock
            return
        _refuse_foreign(out, {record, *files})
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            work = Path(scratch) / out.name
            work.mkdir()
            make(work)
            (work / record).write_text(json.dumps(settings, indent=2) + "\n")
            if out.exists():
                shutil.rmtree(out)
            work.rename(out)


def _refuse_foreign(out: Path, names: set[str]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out {out} is a file: give an empty folder")
    foreign = {path.name for path in out.iterdir()} - names
    if foreign:
        raise ValueError(f"--out {out} holds {sorted(foreign)}, not written by this command: give an empty folder")


def _is_made(record: Path, settings: dict[str, Any]) -> bool:
    """Return whether an earlier call made the folder with these settings."""
    return record.exists() and not differences(read_record(record), settings)
