"""Each defect that the device of the tests has shown has a test, which fails once the defect is put back (`defects.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "one_part_ends_a_hook": "rank/hooks/test_step_device.py::test_steps_are_told_where_no_reading_can_be_made",
    "every_asker_reads": "rank/hooks/test_step_device.py::test_a_rank_that_is_alone_reads_each_gradient_once_a_step",
    "results_are_made_anew": "kernels/test_device_pass.py::test_after_the_third_step_nothing_is_allocated_and_only_addresses_travel",
    "nobody_holds": "rank/hold/test_device_flags.py::test_gradients_that_go_bad_after_a_scaler_has_looked_are_left_out_too",
    "saved_on_the_training_s_stream": "frameworks/test_rescue_device.py::test_what_is_saved_while_a_stream_hangs_is_proven_by_its_keeper",
    "device_time_is_not_seen": "rank/publish/test_budget_device.py",
    "captures_are_not_seen": "kernels/test_device_pass.py::test_inside_a_capture_nothing_is_started_and_the_replay_is_the_users",
    "tensors_are_held": "kernels/test_device_pass.py::test_nothing_is_held_after_the_start",
    "queued_work_is_not_waited_for": "rank/undo/test_snapshots_device.py",
    "one_program_a_row": "kernels/test_device_pass.py::test_a_large_tensor_is_combined_by_several_programs_into_the_same_row",
    "unknown_dtypes_raise": "kernels/test_device_pass.py::test_dtypes_without_statistics_are_read_as_bytes_beside_others",
    "kernels_are_compiled_in_hooks": "rank/readings/test_warming.py::test_steps_are_told_while_kernels_are_compiled_and_read_once_they_are_there",
    "tables_are_pageable": "kernels/test_device_pass.py::test_the_first_reading_is_not_waited_for_either",
    "streams_come_from_the_pool": "kernels/test_device_pass.py::test_the_side_stream_is_made_once_by_the_runtime_outside_of_the_pool_and_does_not_wait_for_the_default_one",
    "pinned_memory_is_taken_tensor_by_tensor": "kernels/test_device_pass.py::test_pinned_memory_is_one_slab_for_many_passes",
    "our_flag_hides_the_weights": "rank/hooks/test_step_device.py::test_weights_are_looked_at_where_the_device_is_asked_to_leave_steps_out",
    "a_device_that_captures_is_asked": "rank/hooks/test_graphs.py::test_where_steps_are_held_a_capture_holds_what_the_script_captures_and_nothing_else",
    "autograds_thread_is_a_stranger": "rank/hooks/test_step_device.py::test_optimizers_that_step_inside_of_backward_are_followed_into_autograds_thread",
    "copies_under_way_are_read": "frameworks/test_deepspeed_offload.py::test_a_gradient_in_the_middle_of_a_copy_is_left_out_until_the_copy_is_over",
}


@pytest.mark.release
@pytest.mark.parametrize("defect", TESTS)
def test_a_defect_that_is_put_back_fails_its_test(defect: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-x",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/pytest",
    ]
    run = subprocess.run(
        [*command, ROOT / "tests" / TESTS[defect]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TESTS_DEFECT": defect},
        cwd=ROOT,
    )
    assert pytest.ExitCode.TESTS_FAILED == run.returncode, run.stdout[-3000:] + run.stderr[-3000:]
    assert "1 failed" in run.stdout
