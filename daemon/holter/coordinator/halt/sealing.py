"""What a halt leaves on the disk: a directory to save into, the sealed checkpoint, halt.json.

These functions are called in separate threads, because a disk may hang.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

from holter.clock import monotonic_s, rfc3339, wall_ns
from holter.coordinator.halt.driver import Outcome
from holter.errors import VaultError
from holter.halting import halt_record
from holter.halting.plan import Wish
from holter.halting.vault.manifest import PARTS, Circumstances
from holter.halting.vault.store import FOLDER, Sealed, Vault
from holter.records import Healthy

UNHEARD_S = 30.0
UNHEARD_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class HaltEnding:
    """What is known of a halt when its ranks have saved."""

    run_dir: Path
    partial: Path
    """Directory into which they saved."""
    about: Circumstances
    wish: Wish
    last_healthy: Healthy | None
    """The last healthy checkpoint from before the halt; None if there is none."""
    unheard: tuple[int, ...] = ()
    """Savers that fell silent without being seen to end: they may still be saving."""


@dataclass(frozen=True)
class SealedHalt:
    """The result of sealing."""

    outcome: Outcome
    sealed: Sealed | None
    """The checkpoint; None if nothing could be sealed."""


def open_directory(run_dir: Path, step: int, stamp: int = 0) -> tuple[Path, str]:
    """Make the directory for saving; return it, and why it cannot be used, which is empty if it can.

    `step` counts all completed steps, including those before a resume.
    """
    vault = Vault(run_dir)
    try:
        return vault.begin(step, stamp), ""
    except VaultError as error:
        return vault.partial(step, stamp), str(error)


def seal(ending: HaltEnding) -> SealedHalt:
    """Seal the checkpoint and write halt.json; errors of the disk are part of the result."""
    if (done := _done_before(ending)) is not None:
        return done
    _await_parts(ending)
    try:
        sealed, failure = Vault(ending.run_dir).seal(ending.partial, ending.about), ""
    except VaultError as error:
        sealed, failure = None, "; ".join(dict.fromkeys(ending.about.failures.values())) or str(error)
        if ending.about.failures:
            # It is of no use, and may be what has filled the disk: halt.json and the report need room.
            Vault(ending.run_dir).discard(ending.partial)
    record = _record(ending, sealed, failure)
    unmarked = ""
    try:
        halt_record.write(ending.run_dir, record)
    except OSError as error:
        unmarked = f"; halt.json could not be written ({error.strerror}): nothing stops a blind restart"
    return SealedHalt(_outcome(record, sealed, failure, unmarked), sealed)


def _done_before(ending: HaltEnding) -> SealedHalt | None:
    """Return the result of a former coordinator that died between sealing and ordering to leave; None if there is none.

    Its checkpoint and its halt.json stay as they are.
    """
    record = halt_record.read(ending.run_dir)
    if ending.partial.exists() or record is None or record.checkpoint is None:
        return None
    is_ours = (record.run_id, record.step) == (ending.about.run_id, ending.about.step)
    kept = [one for one in Vault(ending.run_dir).all() if one.state == ending.run_dir / record.checkpoint]
    return SealedHalt(_outcome(record, kept[0], "", ""), kept[0]) if is_ours and kept else None


def _await_parts(ending: HaltEnding) -> None:
    """Wait for ranks whose sidecar was killed: they go on saving, and only the disk shows when they are done."""
    until_s = monotonic_s() + UNHEARD_S
    parts = [ending.partial / PARTS / f"{rank}.json" for rank in ending.unheard]
    while monotonic_s() < until_s and not all(part.exists() for part in parts):
        threading.Event().wait(UNHEARD_POLL_S)


def _record(ending: HaltEnding, sealed: Sealed | None, failure: str) -> halt_record.HaltRecord:
    is_whole = sealed is not None and sealed.verdict != "incomplete"
    kept = sealed.state.relative_to(ending.run_dir) if sealed is not None and is_whole else None
    why = sealed.why if sealed is not None else f"nothing was saved: {failure}"
    before = ending.last_healthy if sealed is None or sealed.verdict not in ("healthy", "unknown") else None
    if (
        before is not None
        and sealed is not None
        and sealed.verdict != "incomplete"
        and before.step >= sealed.manifest.step
    ):
        # The same state, or one derived from it: what was found in this one's values is in that one too.
        before = None
    if before is not None:
        why += f"; the last healthy checkpoint is of step {before.step}: {before.path}"
    return halt_record.HaltRecord(
        cause=ending.about.cause,
        ranks=list(ending.wish.ranks),
        step=ending.about.step,
        checkpoint=str(kept) if kept is not None else None,
        verdict=sealed.verdict if sealed is not None else "incomplete",
        incident=ending.wish.incident,
        at=rfc3339(wall_ns()),
        why=why,
        reason=ending.wish.reason,
        framework=sealed.manifest.framework if sealed is not None else "",
        run_id=ending.about.run_id,
        healthy_step=before.step if before is not None else None,
        healthy_checkpoint=before.path if before is not None else None,
    )


def _outcome(record: halt_record.HaltRecord, sealed: Sealed | None, failure: str, unmarked: str) -> Outcome:
    go_on = _go_on(record)
    if sealed is None:
        text = f"halted after {record.step} steps, and nothing was saved: {failure}{unmarked}"
        return Outcome("failed", text, go_on=go_on)
    where = f"{FOLDER}/{sealed.path.name}"
    if sealed.verdict == "incomplete":
        text = f"halted after {record.step} steps; what could be saved is not whole ({where}): {sealed.why}"
        return Outcome("incomplete", text + unmarked, where, go_on=go_on)
    doubt = f" ({record.why})" if sealed.verdict != "healthy" else ""
    text = f"halted after {record.step} steps; checkpoint {where}, verified, {sealed.verdict}{doubt}"
    return Outcome("completed", text + unmarked, where, go_on=go_on)


def _go_on(record: halt_record.HaltRecord) -> str:
    """Say in one sentence where to resume, for whoever has repaired the cause."""
    step, checkpoint = record.offered
    if checkpoint is None:
        return f"The run is stopped, after {record.step} steps; no checkpoint was kept, so begin again or from one of your own."
    verdict = record.verdict if checkpoint == record.checkpoint else "healthy"
    return f"The run is stopped: once this is mended, go on from step {step}, {checkpoint} ({verdict}); `holter resume` says how."
