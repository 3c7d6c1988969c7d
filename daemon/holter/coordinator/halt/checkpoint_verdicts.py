r"""The script's own checkpoints, each with a verdict that is revised whenever something new is found.

    SaveFinished -> unknown -> healthy, when every step in it was seen and clean, and replicas were equal after it
                           \-> poisoned, even much later: an incident may turn out to have begun before it

Verdicts are kept in memory and written by the disk's thread, which also checks which checkpoints still exist, because
frameworks rotate them.
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
    """Completed steps as the findings of this life count them; None if an earlier life saved it, so that its verdict is
    final."""


class CheckpointVerdicts:
    """The finished saves of a run that are remembered, oldest first."""

    def __init__(self, run_dir: Path, disk: Disk) -> None:
        self._run_dir, self._disk = run_dir, disk
        self._lifted_step = halt_record.base_step(run_dir)
        """Step of the halt that was lifted for this life of the run; it resumes there, unless a rank knows better."""
        self._completed_before: dict[int, int] = {}
        """For each rank, the steps that the run had completed before it, as counted by its optimizer or framework."""
        self._entries = [_Entry(save, None) for save in store.read_script_saves(run_dir)]
        self._sealed = Vault(run_dir).last_good()
        self._applied: dict[int, Finding] = {}
        """Findings that say that something not finite was applied, by step; kept here because a window forgets."""
        self._diagnoses: dict[str, Diagnosis] = {}
        """The diagnoses of this life; another life counts its steps differently."""
        self._poisoned: int | None = None
        """The first step of this life that a rank says was applied although it was not finite; None if there is
        none."""
        self._found_in: list[verdicts.Spoil] = []
        """Faults that a halt of this life found in the state that it saved."""
        self._pids: dict[int, int] = {}
        self._gone: frozenset[str] = frozenset()

    @property
    def base_step(self) -> int:
        """Completed steps from which this life of the run started."""
        return max(self._completed_before.values(), default=self._lifted_step)

    def recall(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Continue judging the saves that were read, because a former coordinator of this same life wrote them."""
        self._diagnoses |= {diagnosis.id: diagnosis for diagnosis in diagnoses}
        for entry in self._entries:
            if entry.save.step >= self.base_step:
                entry.step = entry.save.step - self.base_step

    def hear(self, observation: Observation) -> None:
        """Take in an observation: a finished save, or the beginning of a rank."""
        match observation.body:
            case SaveFinished() as finished:
                # A save into our own folder belongs to a halt.
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
        """Note that a halt has kept a checkpoint."""
        if sealed.verdict == "healthy":
            self._sealed = sealed
        elif sealed.verdict in ("suspect", "poisoned"):
            # The reason for the verdict may lie in the values themselves: then the script's save of that state has
            # them, too.
            self._found_in.append(verdicts.Spoil(sealed.verdict, sealed.manifest.step - self.base_step, sealed.why))

    def judge(
        self,
        findings: Iterable[Finding],
        diagnoses: Iterable[Diagnosis],
        sight: Callable[[], Sight],
        *,
        is_final: bool = False,
    ) -> list[str]:
        """Judge each save again with what is new or better understood; return warnings that must be given at once.

        At the end nothing is compared any more: replicas that were not seen to differ are believed equal, as in a halt.
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
        """Judge a state of `step` completed steps, as findings of this life count them, which a halt saves."""
        return verdicts.of_halt(step, self._spoils(), compared_until)

    def _spoils(self) -> list[verdicts.Spoil]:
        """Return the faults that detectors found, and those that only the ranks reported."""
        found = verdicts.spoils(self._applied.values(), self._diagnoses.values()) + self._found_in
        said = self._poisoned
        if said is None or any(spoil.verdict == "poisoned" and spoil.first_bad <= said + 1 for spoil in found):
            return found
        why = f"NaN or Inf was applied to the weights at step {said}, as a rank learned too late to hold it"
        return [verdicts.Spoil("poisoned", said + 1, why), *found]

    def all(self) -> list[ScriptSave]:
        """Return the remembered saves, oldest first."""
        return [entry.save for entry in self._entries]

    def is_gone(self, save: ScriptSave) -> bool:
        """Whether the save no longer existed at the last look, because its framework rotates checkpoints."""
        return save.path in self._gone

    def last_healthy(self) -> Healthy | None:
        """Return the newest checkpoint that a run can resume from, a halt's or the script's own; None if none is known."""
        kept = (entry.save for entry in reversed(self._entries) if entry.save.verdict == "healthy")
        own = next((save for save in kept if save.path not in self._gone), None)
        sealed = self._sealed
        if sealed is not None and (own is None or sealed.manifest.sealed_at >= own.saved_at):
            return Healthy(step=sealed.manifest.step, path=str(sealed.state.relative_to(self._run_dir)))
        return None if own is None else Healthy(step=own.step, path=own.path)

    def named(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add the last healthy checkpoint to a diagnosis."""
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
            # It was overwritten: the former content no longer exists.
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
        """Start over with a new process: steps are counted from the beginning again, so later findings concern other steps."""
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
        """Check which saves still exist. It runs in the disk's thread, so that a hanging file server stops nobody else."""
        paths = [entry.save.path for entry in list(self._entries)]
        self._gone = frozenset(path for path in paths if "://" not in path and _is_gone(Path(path)))


def reported_until(steps: Sequence[StepView]) -> int:
    """Return the step up to which every expected rank has reported all steps."""
    unfinished = next((view.step for view in steps if view.missing), None)
    return unfinished if unfinished is not None else steps[-1].step + 1 if steps else 0


def compared_until(classes: Mapping[str, ClassHistory], diagnoses: Iterable[Diagnosis]) -> int | None:
    """Return the last state in which replicas were compared and equal.

    None if nobody compares them, or if it is already explained why they differ.
    """
    has_parted = any(classes[name].first_unequal_step is not None for name in PARAMETERS if name in classes)
    is_explained = has_parted and any(diagnosis.agreed_steps is not None for diagnosis in diagnoses)
    return None if is_explained else weights_agreed(classes)


def _rejudge(entry: _Entry, spoiled: Sequence[verdicts.Spoil], sight: Sight, *, is_final: bool) -> bool:
    """Judge a save again; return whether its verdict changed.

    Losing sight of ranks later does not make a healthy checkpoint doubtful.
    """
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
    """Whether a path no longer exists although its parent directory does; nothing is known of another host's disk."""
    with contextlib.suppress(OSError):
        return not path.exists() and path.parent.is_dir()
    return False
