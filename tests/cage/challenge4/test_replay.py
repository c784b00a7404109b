"""Recorded episodes of the original, played through the simulator: nothing may differ."""

import numpy as np
import pytest
from cage.golden import FOLDER4

from vecenv.cage import TraceError, replay_traces
from vecenv.command.cli import main

TRACES = ["mix_fsm_100", "stress_phish_120", "mix_discovery_120"]
PATHS = [FOLDER4 / f"{name}.npz" for name in TRACES]


def changed(tmp_path, name, change):
    with np.load(FOLDER4 / f"{name}.npz") as file:
        arrays = {key: file[key].copy() for key in file.files}
    change(arrays)
    path = tmp_path / "changed.npz"
    np.savez(path, **arrays)
    return path


def test_recorded_episodes_agree_in_every_field_of_every_step():
    result = replay_traces(PATHS)
    assert [str(found) for found in result.differences] == []
    assert result.num_episodes == 3
    assert result.num_steps == 99 + 120 + 120
    assert result.num_compared > 37 * result.num_steps


# fmt: off
COMPARED = (
    "obs", "obs4", "reward", "reward_parts", "fail_counts", "phase", "blue_family",
    "blue_left", "blue_success", "green", "red_choice", "red_target", "red_session",
    "red_busy", "red_left", "red_done", "red_done_target", "red_success", "red_exploit",
    "red_active", "fsm", "known_subnets", "events", "svc", "decoys", "n_vsftpd", "max_pid",
    "blocks",
)
# fmt: on


def test_a_changed_record_is_reported_with_its_step(tmp_path):
    def change(arrays):
        for step, name in enumerate(COMPARED):
            host = (arrays["net_exists"] == 1) & (np.arange(137) % 17 == 1)
            row = arrays[name][step + 30]
            if row.shape[-1:] == (137,):
                row[..., host] ^= 1
            elif row.ndim:
                row[...] ^= 1
            else:
                arrays[name][step + 30] ^= 1
        arrays["sess_pid"][arrays["sess_off"][70]] += 1

    path = changed(tmp_path, "mix_fsm_100", change)
    found = replay_traces([path], max_differences=1000).differences
    expected = {(step + 30 - (name in {"obs", "obs4"}), name) for step, name in enumerate(COMPARED)}
    assert {(one.step, one.field) for one in found} == expected | {(70, "sess_pid")}
    assert "step 32: reward: expected" in " ".join(map(str, found))


def test_another_draw_than_the_recorded_one_is_reported(tmp_path):
    def change(arrays):
        arrays["tape_n"][arrays["tape_off"][5] + 2] = 4

    (found,) = replay_traces([changed(tmp_path, "mix_fsm_100", change)]).differences[-1:]
    assert (found.step, found.field) == (5, "tape")
    assert "with 4 choices" in found.expected and "with 3 choices" in found.got


DAMAGES = {
    "has no steps of blue_action": lambda arrays: arrays.pop("blue_action"),
    "tape_val has shape": lambda arrays: arrays.update(tape_val=np.zeros(3)),
    "svc is float64, expected integers": lambda arrays: arrays.update(svc=arrays["svc"] * 1.0),
    "tape_off does not": lambda arrays: arrays["tape_off"].__setitem__(4, 1 << 30),
    "agent that knows none": lambda arrays: arrays["net_red_known_subnets"].__setitem__(2, 0),
    "meta_red is 'os:getcwd'": lambda arrays: arrays.update(meta_red=np.array("os:getcwd")),
    "tape_n is 4294967": lambda arrays: arrays.update(
        tape_n=arrays["tape_n"].astype(np.int64) + (1 << 32)
    ),
    "phishing_rate must be": lambda arrays: arrays.update(meta_phish=np.array(np.nan)),
    "has 99 steps, expected at most 49": lambda arrays: arrays.update(meta_steps=np.array(50)),
    "Object arrays cannot be": lambda arrays: arrays.update(reward=np.array([{}] * 99)),  # a pickle
}


@pytest.mark.parametrize("match", DAMAGES)
def test_damaged_files_are_refused(tmp_path, match):
    path = changed(tmp_path, "mix_fsm_100", DAMAGES[match])
    with pytest.raises(TraceError, match=f"changed.npz.*{match}"):
        replay_traces([path])


def test_files_of_another_kind_are_refused(tmp_path):
    whole = (FOLDER4 / "mix_fsm_100.npz").read_bytes()
    wrong = {"text": b"no archive", "empty": b"", "half": whole[: len(whole) // 2]}
    wrong["bit"] = whole[:20000] + bytes([whole[20000] ^ 1]) + whole[20001:]
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match="no trace of CAGE Challenge 4"):
            replay_traces([tmp_path / name])
    with pytest.raises(FileNotFoundError):
        replay_traces([tmp_path / "none.npz"])
    with pytest.raises(TraceError, match="Is a directory"):
        replay_traces([tmp_path])
    with pytest.raises(ValueError, match="max_differences is 0"):
        replay_traces(PATHS, max_differences=0)


def test_the_command_prints_differences_and_says_so_by_its_status(tmp_path, capsys):
    def change(arrays):
        arrays["reward"][7] -= 1

    assert main(["replay", str(PATHS[0])]) == 0
    assert "1 episodes, 99 steps, 3" in capsys.readouterr().out
    path = changed(tmp_path, "mix_fsm_100", change)
    assert main(["replay", str(PATHS[1]), str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}: step 7: reward: expected -1, got 0\n" in out
    assert "2 episodes, 219 steps" in out and "1 differ" in out
    path.write_bytes(b"")
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_values_out_of_range_on_a_tape_stay_inside(tmp_path):
    def change(arrays):
        arrays["tape_val"][::7] = 3e9

    assert replay_traces([changed(tmp_path, "mix_fsm_100", change)]).differences
