r"""The script's own checkpoints as they are finished, each with a verdict that is looked at again whenever something new is found.

    SaveFinished -> unknown -> healthy, when every step in it was seen and clean, and replicas were equal after it
                           \-> poisoned, also long after: an incident may turn out to have begun before it

Verdicts are kept in memory and written down by the disk's own thread, which also looks which checkpoints are still there: frameworks rotate them.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from holter.clock import rfc3339
from holter.coordinator.disk import Disk
from holter.faults.replicas.replica_case import PARAMETERS, weights_agreed
from holter.faults.window import ClassHistory, StepView
from holter.files import as_json, write_whole
from holter.halting import halt_record, verdicts
from holter.halting.vault import store
from holter.halting.vault.store import FOLDER, ScriptSave, ScriptSaves, Sealed, Vault
from holter.halting.verdicts import Sight
from holter.records import Attached, Diagnosis, Finding, FirstStep, Halting, Healthy, Observation, SaveFinished

MAX_SAVES = 256


@dataclass
class _Entry:
    save: ScriptSave
    step: int | None
    """Completed steps, counted as the findings of this life of the run count them; None: an earlier life saved it, and its verdict stands."""


class CheckpointVerdicts:
    """All finished saves of a run that are remembered, oldest first."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self._run_dir, self._disk = run_dir, disk
        self._lifted_step = halt_record.base_step(run_dir)
        """Step of the halt that was lifted for this life of the run: it goes on from there, unless a rank knows better."""
        self._completed_before: dict[int, int] = {}
        """Rank -> steps that the run had completed when it began, as its optimizer or framework counts."""
        self._entries = [_Entry(save, None) for save in store.read_script_saves(run_dir)]
        self._sealed = Vault(run_dir).last_good()
        self._applied: dict[int, Finding] = {}
        """Step -> that something not finite was applied at it; a window forgets."""
        self._diagnoses: dict[str, Diagnosis] = {}
        """The diagnoses of this life: another life counts its steps differently."""
        self._poisoned: int | None = None
        """The first step of this life that a rank says was applied although it was not finite."""
        self._found_in: list[verdicts.Spoil] = []
        """What a halt of this life found in the state that it saved."""
        self._pids: dict[int, int] = {}
        self._gone: frozenset[str] = frozenset()

    @property
    def base_step(self) -> int:
        """Completed steps that this life of the run goes on from."""
        return max(self._completed_before.values(), default=self._lifted_step)

    def recall(self, diagnoses: Iterable[Diagnosis]) -> None:
        """A former coordinator of this very life wrote down what was read: go on judging it."""
        self._diagnoses |= {diagnosis.id: diagnosis for diagnosis in diagnoses}
        for entry in self._entries:
            if entry.save.step >= self.base_step:
                entry.step = entry.save.step - self.base_step

    def hear(self, observation: Observation) -> None:
        """A save was finished, or a rank begins."""
        match observation.body:
            case SaveFinished() as finished:
                # A save into our own folder is a halt's.
                if not Path(finished.path).is_relative_to((self._run_dir / FOLDER).absolute()):
                    self._add(observation, finished)
            case Halting(poisoned_step=int() as step):
                self._poisoned = step if self._poisoned is None else min(step, self._poisoned)
            case FirstStep(completed=None):
                self._completed_before.pop(observation.rank, None)
            case FirstStep(completed=int(completed)):
                self._completed_before[observation.rank] = completed
            case Attached() as attached:
                if self._pids.setdefault(observation.rank, attached.pid) != attached.pid:
                    self._pids[observation.rank] = attached.pid
                    self._settle()

    def note_sealed(self, sealed: Sealed) -> None:
        """A halt has kept a checkpoint."""
        if sealed.verdict == "healthy":
            self._sealed = sealed
        elif sealed.verdict in ("suspect", "poisoned"):
            # What it was called for may be in its own values: then what the script saved of that state has them too.
            self._found_in.append(verdicts.Spoil(sealed.verdict, sealed.manifest.step - self.base_step, sealed.why))

    def judge(
        self,
        findings: Iterable[Finding],
        diagnoses: Iterable[Diagnosis],
        sight: Callable[[], Sight],
        *,
        is_final: bool = False,
    ) -> list[str]:
        """Look at each again, with what is new or better understood; returns what must be said at once.

        At the end nothing is compared any more: replicas that were not seen to part are believed equal, as in a halt.
        """
        self._diagnoses |= {diagnosis.id: diagnosis for diagnosis in diagnoses}
        self._applied |= {found.first_step: found for found in findings if verdicts.is_applied(found)}
        waiting = [entry for entry in self._entries if entry.step is not None]
        if not waiting:
            return []
        spoiled, seen = self._spoils(), sight()
        changed = [entry for entry in waiting if _rejudge(entry, spoiled, seen, is_final=is_final)]
        if changed:
            self._write()
        latest = self._entries[-1]
        is_news = latest in changed and latest.save.verdict == "poisoned"
        return [self._alarm(latest.save)] if is_news else []

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The diagnoses of this life of the run, oldest first."""
        return list(self._diagnoses.values())

    def verdict_of(self, step: int, compared_until: int | None) -> verdicts.CheckpointJudgement:
        """The verdict on a state of so many completed steps (counted as findings of this life count them) that a halt saves."""
        return verdicts.of_halt(step, self._spoils(), compared_until)

    def _spoils(self) -> list[verdicts.Spoil]:
        """What detectors found, and whatever else the ranks say was applied."""
        found = verdicts.spoils(self._applied.values(), self._diagnoses.values()) + self._found_in
        said = self._poisoned
        if said is None or any(spoil.verdict == "poisoned" and spoil.first_bad <= said + 1 for spoil in found):
            return found
        why = f"NaN or Inf was applied to the weights at step {said}, as a rank learned too late to hold it"
        return [verdicts.Spoil("poisoned", said + 1, why), *found]

    def all(self) -> list[ScriptSave]:
        """Those that are remembered, oldest first."""
        return [entry.save for entry in self._entries]

    def is_gone(self, save: ScriptSave) -> bool:
        """Whether its framework had rotated it away at the last look."""
        return save.path in self._gone

    def last_healthy(self) -> Healthy | None:
        """The newest checkpoint that a run can go on from, as far as is known: a halt's or the script's own."""
        kept = (entry.save for entry in reversed(self._entries) if entry.save.verdict == "healthy")
        own = next((save for save in kept if save.path not in self._gone), None)
        sealed = self._sealed
        if sealed is not None and (own is None or sealed.manifest.sealed_at >= own.saved_at):
            return Healthy(step=sealed.manifest.step, path=str(sealed.state.relative_to(self._run_dir)))
        return None if own is None else Healthy(step=own.step, path=own.path)

    def named(self, diagnosis: Diagnosis) -> Diagnosis:
        """The same diagnosis, with the checkpoint that is good."""
        action = msgspec.structs.replace(diagnosis.action, last_healthy=self.last_healthy())
        return msgspec.structs.replace(diagnosis, action=action)

    def _add(self, observation: Observation, finished: SaveFinished) -> None:
        step = self.base_step + observation.step
        known = next((entry for entry in self._entries if entry.save.path == finished.path), None)
        if known is not None and known.save.step == step and known.step is not None:
            ranks = sorted({*known.save.ranks, observation.rank})
            known.save = msgspec.structs.replace(known.save, ranks=ranks)
            return
        if known is not None:
            # Written over: what was there is there no more.
            self._entries.remove(known)
        save = ScriptSave(
            step=step,
            path=finished.path,
            framework=finished.framework,
            saved_at=rfc3339(observation.at_ns),
            seconds=finished.seconds,
            verdict="unknown",
            why="it is being looked at",
            ranks=[observation.rank],
        )
        self._entries.append(_Entry(save, observation.step))
        del self._entries[:-MAX_SAVES]
        self._write()
        self._disk.submit(self._look)

    def _settle(self) -> None:
        """Steps are counted from the beginning again: what is found from now on is of other steps."""
        self._applied.clear()
        self._found_in.clear()
        self._poisoned = None
        self._diagnoses.clear()
        self._entries = [replace(entry, step=None) for entry in self._entries]

    def _alarm(self, save: ScriptSave) -> str:
        healthy = self.last_healthy()
        last = f"the last healthy one is of step {healthy.step} ({healthy.path})" if healthy else ""
        what = f"the checkpoint saved at step {save.step} ({save.path}) is poisoned: {save.why}"
        return f"{what}; {last or 'no healthy one is known'}"

    def _write(self) -> None:
        path = store.script_saves_path(self._run_dir)
        content = as_json(ScriptSaves([entry.save for entry in self._entries]))
        self._disk.submit(partial(write_whole, path, content, makes_folder=True))

    def _look(self) -> None:
        """In the disk's thread: a file server that hangs stops nobody else."""
        paths = [entry.save.path for entry in list(self._entries)]
        self._gone = frozenset(path for path in paths if "://" not in path and _is_gone(Path(path)))


def reported_until(steps: Sequence[StepView]) -> int:
    """All steps below this were reported by every rank of which it is expected."""
    unfinished = next((view.step for view in steps if view.missing), None)
    return unfinished if unfinished is not None else steps[-1].step + 1 if steps else 0


def compared_until(classes: Mapping[str, ClassHistory], diagnoses: Iterable[Diagnosis]) -> int | None:
    """The last state in which replicas were compared and equal; None: nobody compares, or it is explained already why they differ."""
    has_parted = any(classes[name].first_unequal_step is not None for name in PARAMETERS if name in classes)
    is_explained = has_parted and any(diagnosis.agreed_steps is not None for diagnosis in diagnoses)
    return None if is_explained else weights_agreed(classes)


def _rejudge(entry: _Entry, spoiled: Sequence[verdicts.Spoil], sight: Sight, *, is_final: bool) -> bool:
    """Judge again; True when the verdict has changed. Losing sight later does not make a healthy checkpoint doubtful."""
    assert entry.step is not None
    found, save = verdicts.of_state(entry.step, spoiled, sight), entry.save
    if is_final and found.verdict == "unknown" and not sight.blind and sight.until_step >= entry.step:
        found = verdicts.of_halt(entry.step, spoiled, sight.compared_until)
    is_unseen = found.verdict == "unknown" and not found.incident
    if (is_unseen and save.verdict == "healthy") or (found.verdict, found.why) == (save.verdict, save.why):
        return False
    has_changed = found.verdict != save.verdict
    entry.save = msgspec.structs.replace(save, verdict=found.verdict, why=found.why, incident=found.incident)
    return has_changed


def _is_gone(path: Path) -> bool:
    """Whether it is gone: not there, although its parent directory is. Another host's disk says nothing."""
    with contextlib.suppress(OSError):
        return not path.exists() and path.parent.is_dir()
    return False
