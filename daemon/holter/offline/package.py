"""Answers the context package that agents pass on, and says what must still be asked if the artifacts do not decide. Pure.

in    {"task", "artifacts": {"training_logs", "loss_curves", "model_code", "error_messages", "config"}, "symptoms", "constraints"}
out   the same, and {"status", "root_causes", "quick_fixes", "questions", "analysis_artifacts"}
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from holter.diagnosis.explain import SURE
from holter.offline import naming
from holter.offline.found import Found
from holter.records import Cause, Diagnosis

NO_LOG = "Where is the log of the run? `python train.py 2>&1 | tee train.log`, or the trainer_state.json of its last checkpoint: without numbers over time no cause can be told from another."
NO_NORM = "What was the gradient norm at each step? It tells an explosion from bad data: `norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); print(f'step {step} grad_norm {norm:.4f}')`."
NO_RATE = "What was the learning rate at each step? A jump or a peak at the onset decides: `print(f'step {step} lr {scheduler.get_last_lr()[0]:.3e}')`, or the config."
NO_SETTINGS = "Which settings did it run with? Give the config (YAML, JSON, or what argparse printed) beside the log."


def questions(found: Found, diagnoses: list[Diagnosis]) -> list[str]:
    """Return one sentence for each thing that would decide the diagnosis, and how to get it: first what causes lack, then what artifacts lack."""
    unsure = [one.causes[0] for one in diagnoses if one.causes[0].confidence < SURE]
    asked = [gap for cause in unsure for gap in cause.missing]
    asked += [f"{name} was named but is not there: give it, or say that it does not exist." for name in found.absent]
    if not found.runs and not found.errors and not found.dumps:
        asked.append(NO_LOG)
    elif found.runs and (unsure or (found.symptoms and not diagnoses)):
        roles = {naming.role(name) for run in found.runs for name in run.names()}
        asked += [NO_RATE] if "learning_rate" not in roles else []
        asked += [NO_NORM] if "gradient_norm" not in roles else []
        asked += [NO_SETTINGS] if not found.configs else []
    return list(dict.fromkeys(asked))


FEW_LOGS = 20
_SEEN: Mapping[str, str] = {
    "loss": "the loss",
    "gradient_norm": "the gradient norm",
    "learning_rate": "the learning rate",
    "evaluation": "the loss on held-out data",
}


def lacking(found: Found) -> list[str]:
    """Return in words the series that detectors need and no log has, and a trend if the logs are too short for one."""
    roles = {naming.role(name) for run in found.runs for name in run.names()}
    made = [what for role, what in _SEEN.items() if role not in roles]
    longest = max((run.num_points for run in found.runs), default=0)
    if found.runs and longest < FEW_LOGS:
        made.append(f"a trend ({longest} logs are few)")
    return made


def answer(found: Found, diagnoses: list[Diagnosis]) -> dict[str, Any]:
    """Return the context package with the diagnoses added."""
    tops = [(one, one.causes[0]) for one in diagnoses]
    return {
        "task": found.task or "Why does this run fail or train badly?",
        "artifacts": _artifacts(found),
        "symptoms": found.symptoms or [one.symptom for one in diagnoses],
        "constraints": found.constraints,
        "status": _status(found, [cause for _, cause in tops]),
        "root_causes": [
            {
                "issue": cause.cause,
                "severity": one.severity,
                "evidence": [
                    evidence.summary for evidence in cause.evidence if evidence.kind not in {"missing", "series"}
                ],
                "fix": cause.fix.do,
                "confidence": cause.confidence,
                "missing": list(cause.missing),
            }
            for one, cause in tops
        ],
        "quick_fixes": [cause.fix.do for _, cause in tops],
        "questions": questions(found, diagnoses),
        "analysis_artifacts": msgspec.to_builtins(diagnoses),
    }


def _status(found: Found, tops: list[Cause]) -> str:
    if any(cause.confidence >= SURE for cause in tops):
        return "diagnosed"
    return "not_enough_evidence" if tops or found.symptoms or not found.runs else "nothing_found"


def _artifacts(found: Found) -> dict[str, list[str]]:
    """Return kind of artifact -> its files."""
    made = {
        "training_logs": [run.file for run in found.runs],
        "loss_curves": [run.file for run in found.runs if any(naming.role(name) == "loss" for name in run.names())],
        "model_code": [code.file for code in found.code],
        "error_messages": [error.file for error in found.errors],
        "config": [config.file for config in found.configs],
    }
    return {kind: list(dict.fromkeys(files)) for kind, files in made.items()}
