"""Evaluation by the challenge's protocol, its policies, the NumPy player, pictures."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vecenv import ActionError
from vecenv.cage import (
    CAGE4_RULES_VERSION,
    Cage4Events,
    Cage4Memory,
    Cage4Player,
    Cage4VectorEnv,
    evaluate_cage4,
    save_cage4_defender,
)
from vecenv.cage.challenge4 import player as player_module
from vecenv.cage.challenge4.playing import find_policy, play_episodes, seated
from vecenv.cage.challenge4.rules import codes
from vecenv.command.cli import main
from vecenv.page import EpisodePage, action_names, record

PLAYER = Path(player_module.__file__)


def random_weights(width=8, seed=0):
    rng = np.random.default_rng(seed)
    hosts, units = Cage4Memory.num_host_features, Cage4Memory.num_unit_features
    shapes = {"host": (width, hosts), "unit": (width, units), "again": (width, width)}
    shapes |= {"pooled": (width, 2 * width), "act": (4, width), "direct": (4, hosts)}
    weights = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    return weights | {f"{name}.bias": rng.normal(size=shape[0]) for name, shape in shapes.items()}


@pytest.fixture
def defender(tmp_path):
    save_cage4_defender(tmp_path / "defender.npz", random_weights(), steps=7)
    return tmp_path / "defender.npz"


def test_a_page_says_what_every_agent_does_also_those_that_are_busy():
    """Restore takes five steps and Remove three, in which a new action is not begun."""
    page = EpisodePage("a game", {}, fps=2)
    chosen = [33, 17, 49, 49, 145]  # Restore and Remove of a server, Sleep
    actions = iter([chosen, *[[49, 49, 49, 49, 145]] * 2, [49, 33, 49, 49, 145]])
    policy, options = (lambda obs, masks: np.array([next(actions)])), {"render_mode": "rgb_array"}
    with seated(policy, debug=True, **options) as seat:
        names = action_names(seat.envs, "Cage4-v0")
        names = names._replace(parts=names.parts[:5])
        given = {"seed": 0, "num_steps": 4, "tell": seat.tell}
        record(page, seat.envs, seat.act, names, lambda: seat.envs.render()[0], **given)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.to_html(), re.DOTALL)[1])
    shown = [step["action"].split("; ") for step in data["steps"][:-1]]
    assert [words[:2] for words in shown] == [
        ["blue 0: Restore RZA server 0", "blue 1: Remove OZA server 0"],
        [
            "blue 0: busy with Restore RZA server 0, 3 more",
            "blue 1: busy with Remove OZA server 0, 1 more",
        ],
        ["blue 0: busy with Restore RZA server 0, 2 more", "blue 1: finishes Remove OZA server 0"],
        ["blue 0: busy with Restore RZA server 0, 1 more", "blue 1: Restore OZA server 0"],
    ]
    for words in shown:
        assert words[2:] == ["blue 2: Sleep", "blue 3: Sleep", "blue 4: Sleep"]
    deeds = [fact for step in data["steps"] for fact in step.get("facts", [])]
    assert ["red 0", "PrivilegeEscalate"] in [[name, what.split()[0]] for name, what in deeds]


def test_the_score_leaves_out_the_last_reward(tmp_path):
    found = play_episodes("random", 6, seed=3, steps=80)
    result = evaluate_cage4("random", episodes=6, seed=3, steps=80)
    returns = found.rewards.sum(axis=0)
    assert found.rewards.shape == (79, 6) and (found.rewards[-1] < 0).any()
    assert result.total.mean == returns.mean()
    assert result.score.mean == (returns - found.rewards[-1]).mean()
    assert result.score.sd == pytest.approx((returns - found.rewards[-1]).std(ddof=1))
    assert sum(phase.mean for phase in result.phases) == pytest.approx(result.total.mean)
    assert sum(cause.mean for cause in result.causes.values()) == pytest.approx(result.total.mean)
    phases = np.stack([part.sum(axis=0) for part in np.split(found.rewards, [27, 54])])
    np.testing.assert_array_equal(found.phases.T, phases)
    saved = json.loads(result.to_json(tmp_path / "result.json"))
    assert saved["return"]["mean"] == result.total.mean and saved["episodes"] == 6
    assert "score (78 rewards)" in str(result) and "Restore" in str(result)


def test_episodes_do_not_depend_on_how_many_are_played_at_a_time(monkeypatch):
    whole = play_episodes("react-restore", 5, seed=2, steps=60).rewards
    monkeypatch.setattr("vecenv.cage.challenge4.playing._BATCH", 2)
    parts = play_episodes("react-restore", 5, seed=2, steps=60).rewards
    np.testing.assert_array_equal(parts, whole)


def test_policies_are_found_by_name_file_module_object_and_function(defender, monkeypatch):
    def function(observations, masks):
        assert [len(mask.T) for mask in masks] == [len(n) for n in map(range, codes.NUM_ACTIONS)]
        return np.tile(codes.SLEEPS, (len(observations[0]), 1)), np.full((2, 5), 255)

    assert evaluate_cage4(function, episodes=2, steps=20).policy == "function"
    for policy in (defender, str(defender), Cage4Player(defender)):
        assert evaluate_cage4(policy, episodes=2, steps=20).episodes == 2
    monkeypatch.syspath_prepend(str(defender.parent))
    (defender.parent / "my_cage4.py").write_text(
        "from vecenv.cage import Cage4Player\n"
        f"class Mine(Cage4Player):\n    def __init__(self): super().__init__({str(defender)!r})\n"
    )
    assert evaluate_cage4("my_cage4:Mine", episodes=2, steps=20).policy == "my_cage4:Mine"
    with pytest.raises(ValueError, match="no built-in policy, no file; expected a file"):
        find_policy("nobody")
    other = defender.parent / "cage2_run"
    other.mkdir()
    (other / "policy.npz").touch()
    with pytest.raises(ValueError, match=r"without a defender.npz .it belongs to the other"):
        find_policy(other)
    with pytest.raises(TypeError, match="expected an object with reset"):
        find_policy(3)
    with pytest.raises(TypeError, match=r"calls reset\(masks\), but it has reset\(\)"):
        find_policy(type("Fort", (), {"act": None, "reset": lambda self: None}))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (np.zeros((2, 4), int), r"actions of int64 \(2, 4\), expected integers \(2, 5\)"),
        (np.zeros((2, 5)), "actions of float64"),
        (None, "actions of object"),
        (np.full((2, 5), 100), r"actions\[0\] \(env 0\) is \[100 100"),
        (
            (np.zeros((2, 5), int), np.full((2, 5), 256)),
            r"actions\[0\] \(env 0\) is \[  0   0   0   0   0 256",
        ),
    ],
)
def test_wrong_answers_of_a_policy_are_refused(answer, match):
    with pytest.raises(ActionError, match=match):
        evaluate_cage4(lambda observations, masks: answer, episodes=2, steps=20)
    with pytest.raises(ValueError, match="episodes is 1, expected"):
        evaluate_cage4("sleep", episodes=1)


def test_the_command_evaluates(capsys, tmp_path):
    path = tmp_path / "numbers.json"
    args = ["evaluate", "--challenge", "4", "--policy", "sleep", "--episodes", "2"]
    assert main([*args, "--json", str(path)]) == 0
    assert "sleep against fsm: 2 episodes of 500 steps" in capsys.readouterr().out
    assert json.loads(path.read_text())["causes"]["action_cost"]["mean"] == 0
    assert main([*args, "--red-agents", "sleep", "--rules", "debugged"]) == 2
    assert main([*args, "--red-agents", "b_line"]) == 2
    assert "red must be one of fsm, discovery, sleep" in capsys.readouterr().err


def test_the_version_of_the_rules_is_raised_when_they_change():
    """If this fails, raise CAGE4_RULES_VERSION: scores and defenders of before are others'."""
    envs = Cage4VectorEnv(6, messages=True, steps=60, autoreset_mode="Disabled")
    obs, _ = envs.reset(seed=5)
    digest, rng = hashlib.sha256(obs.tobytes()), np.random.default_rng(6)
    for _ in range(59):
        actions = [rng.integers(0, n, 6) for n in envs.single_action_space.nvec]
        obs, rewards, *_ = envs.step(np.stack(actions, axis=1))
        digest.update(obs.tobytes() + rewards.astype(np.int32).tobytes())
    assert (CAGE4_RULES_VERSION, digest.hexdigest()[:16]) == (1, "0ac928506715a4ea")


def test_results_and_defenders_carry_the_version_of_the_rules(defender, tmp_path):
    options = {"episodes": 2, "steps": 20, "phishing_rate": 0.5}
    fields = json.loads(evaluate_cage4(defender, **options).to_json())
    assert fields["scenario"] == "CAGE Challenge 4"
    assert fields["rules_version"] == CAGE4_RULES_VERSION
    assert (fields["phishing_rate"], fields["alarm_rate"]) == (0.5, 0.01)
    path = tmp_path / "other.npz"
    save_cage4_defender(path, random_weights(), rules_version=CAGE4_RULES_VERSION + 1)
    for policy in (path, str(path)):
        with pytest.warns(UserWarning, match=r"other\.npz was made with version 2 of the rules"):
            find_policy(policy)


def work_on_host(seen, sessions, is_attacked, restores, due):
    """What the rules want to do with a host: look, remove, restore."""
    look = remove = restore = known = False
    num_sources = 0
    for t, x in enumerate(seen):
        look = (look and not x["is_analysed"]) or x["is_removed"]
        remove = remove and not x["is_removed"]
        restore = restore or x["has_escalate"] or (x["has_cmd"] and not known)
        if x["is_restored"]:
            look = remove = restore = known = False
            num_sources = 0
        remove, known = remove or sessions[t], known or sessions[t]
        look = look or is_attacked[t] or x["is_source"] > 0
        num_sources += x["is_source"] > 0
        restore = restore or (num_sources > 0 and due[t])
        restore = restore and (t not in restores or t == len(seen) - 1)
    return {"look": look, "remove": remove, "restore": restore}


def features_of_host(seen, decoys, restores, due):
    """What is remembered of a host that was seen so in each step, with what was begun then."""
    attacks = [f"local_{name}" for name in ("ssh", "ot", "http", "https", "sql", "mail", "drawn")]
    is_attacked = [any(x[name] for name in (*attacks, "remote_ssh")) for x in seen]
    found, stale = dict.fromkeys(player_module.HOST_FEATURES, 0.0), seen[-1]["since_analyse"]
    since = max(t for t, x in enumerate(seen) if x["is_restored"] or t == 0)
    sessions, sources = ([x[name] > 0 for x in seen] for name in ("session", "is_source"))
    for name, when, many, most in (
        ("session", sessions, "sessions", 2),
        ("attack", is_attacked, "attacks", 4),
        ("source", sources, "sources", 3),
    ):
        times = [t for t in range(since, len(seen)) if when[t]]
        steps_since = min(len(seen) - 1 - times[-1], 255) if times else 255
        found[many] = min(len(times) / most, 2)
        found[f"{name}_fades"] = np.exp(np.float32(-steps_since / 8))
        found[f"{name}_steps"] = min(steps_since / 100, 1)
        found[f"{name}_is_new"] = steps_since < stale
    for name in ("analyse", "restore"):
        found[f"{name}_fades"] = np.exp(np.float32(-seen[-1][f"since_{name}"] / 8))
        found[f"{name}_steps"] = min(seen[-1][f"since_{name}"] / 100, 1)
    for name in ("is_source", "session", "alarm"):
        found[name] = min(seen[-1][name], 3)
    for name in ("cmd", "escalate"):
        found[f"had_{name}"] = any(x[f"has_{name}"] for x in seen[since + 1 :])
    found |= {"is_attacked": is_attacked[-1], "known": any(sessions[since:])}
    found["was_removed"] = any(x["is_removed"] for x in seen[since + 1 :])
    found |= work_on_host(seen, sessions, is_attacked, restores, due)
    num_decoys = sum(t >= since for t in decoys)
    return found | ({f"decoys_{num_decoys}": 1} if num_decoys < 3 else {})


def features_of(rows, masks, begun, own_rule):
    """What `Cage4Memory` says of a game's hosts, worked out from the whole episode: (7, 16, 39)."""
    names, weights = Cage4Events.NODE_FEATURES, np.where(np.arange(16) < 6, 1, 4)
    out = np.zeros((7, 16, len(player_module.HOST_FEATURES)), np.float32)
    for unit in range(7):
        agent, first = min(unit, 4), 16 * max(unit - 4, 0)
        steps = [Cage4Events.of(row[agent]).nodes for row in rows]
        begun_here = [t for t, (kind, own, _) in begun if kind == "Restore" and own == unit]
        times, mission = np.arange(len(rows)), {1: (107, 334), 3: (274, 500)}.get(unit, (0, 0))
        is_few = np.array([sum(b < t for b in begun_here) < 3 for t in times])
        due = is_few & (times >= 90) & (unit < 4) | (times >= mission[0]) & (times < mission[1])
        for host in range(16):
            seen = [dict(zip(names, x[first + host].tolist(), strict=True)) for x in steps]
            decoys, restores = (
                [t for t, what in begun if what == (kind, unit, host)]
                for kind in ("Decoy", "Restore")
            )
            exists = masks[agent][first + host]
            found = features_of_host(seen, decoys, restores, due)
            found |= {"exists": exists, "is_user": exists * (host >= 6), "is_first": host == 0}
            found["stale"] = (1 + seen[-1]["since_analyse"]) * weights[host] * exists
            out[unit, host] = list(found.values())
    for units in player_module.UNITS:
        own = out[units, :, -6].reshape(-1)
        out[units, :, -5] = (np.arange(len(own)) == own.argmax()).reshape(-1, 16)
        out[units, :, -6] = (own / own.max()).reshape(-1, 16)
    for unit, host, kind in own_rule:
        out[unit, host, -4 + kind] = 1
    return out


def test_the_memory_says_what_has_happened():
    """Choices at random: features equal a slow twin's, and what is begun is what happens."""
    steps, num = 200, 3
    options = {"messages": True, "observation": "events", "autoreset_mode": "Disabled"}
    envs = Cage4VectorEnv(num, steps=steps, phishing_rate=0.1, **options)
    obs, _ = envs.reset(seed=0)
    masks = [mask.copy() for mask in envs.agent_masks()]
    memory, rng = Cage4Memory(num), np.random.default_rng(0)
    memory.begin(masks)
    rows, begun, kinds = [], [], set()
    seen = np.zeros(len(player_module.HOST_FEATURES), bool)
    for step in range(steps - 1):
        rows.append([row[0].copy() for row in envs.agent_obs(obs)])
        memory.note(envs.agent_obs(obs))
        np.testing.assert_array_equal(memory.is_free, envs.states["blue_left"] == 0)
        features, units = memory.host_features(), memory.unit_features()
        assert units.shape == (num, 7, Cage4Memory.num_unit_features) and (units <= 2).all()
        own_rule = []
        for agent, choice in enumerate(memory.rule_choices()[0].tolist()):
            own_rule.append((agent + choice // 64, choice // 4 % 16, choice % 4))
        if step % 49 == 0 or step > 195:
            twin = features_of(rows, [mask[0] for mask in masks], begun, own_rule)
            np.testing.assert_allclose(features[0], twin, atol=1e-6, err_msg=str(step))
        seen |= (features > 0).any(axis=(0, 1, 2))
        useless, choices = memory.useless(), np.zeros((num, 5), int)
        for game in range(num):
            for agent, own in enumerate(player_module.UNITS):
                useful = np.flatnonzero(~useless[game, own].reshape(-1))
                choices[game, agent] = rng.choice(useful)
        actions = memory.act(choices)
        for agent in np.flatnonzero(memory.is_free[0]).tolist():
            host, kind = divmod(int(choices[0, agent]), 4)
            begun.append((step, (player_module.KINDS[kind], agent + host // 16, host % 16)))
        families = codes.ACTION_FAMILY[np.arange(5), actions]
        np.testing.assert_array_equal(memory.restores(actions), families == codes.RESTORE)
        was_free = memory.is_free.copy()
        obs, *_ = envs.step(np.concatenate([actions, np.zeros((num, 5), int)], axis=1))
        assert (envs.states["blue_family"] == families)[was_free].all()
        assert (families == codes.SLEEP)[~was_free].all()
        kinds |= set(families.ravel().tolist())
    assert {codes.ANALYSE, codes.REMOVE, codes.RESTORE, codes.DECOY} <= kinds and seen.all()
    with pytest.raises(ValueError, match=r"agent 0 has shape \(3, 92\), expected \(3, 726\)"):
        memory.note([np.zeros((3, 92))] * 5)


@pytest.mark.parametrize("changed", range(5))
def test_an_agent_knows_the_phase_from_its_own_observation_alone(defender, changed):
    """What one agent sees of the phase changes its own choices' probabilities, and no other's."""
    masks = [np.ones(82, bool)] * 4 + [np.ones(242, bool)]
    found = []
    for phase in (0, 1):
        rows = [np.zeros(726, np.uint8) for _ in range(4)] + [np.zeros(2102, np.uint8)]
        rows[changed][0] = phase
        player, report = Cage4Player(defender), {}
        player.reset(masks)
        player.act(rows, report)
        found.append(report["probabilities"])
    same = [np.array_equal(*shares) for shares in zip(*found, strict=True)]
    assert same == [agent != changed for agent in range(5)]


def test_a_player_needs_only_numpy(defender):
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("player", {str(PLAYER)!r})
module = importlib.util.module_from_spec(spec)
sys.modules["player"] = module
spec.loader.exec_module(module)
import numpy as np
player = module.Cage4Player({str(defender)!r})
assert player.facts == {{"steps": 7}}
player.reset([[True] * 82] * 4 + [[True] * 242])
actions = player.act([np.zeros(726, np.uint8)] * 4 + [np.zeros(2102, np.uint8)])
assert actions.shape == (5,) and (actions >= 0).all() and (actions[:4] < 82).all()
assert not [name for name in sys.modules if name.split(".")[0] in ("vecenv", "numba", "torch")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_the_installed_defender_and_the_rules_defend_well():
    """Means of 1 000 episodes are -94; those of 60 have a standard error of 4.5."""
    for policy in ("defender", "rules"):
        result = evaluate_cage4(policy, episodes=60, seed=100)
        assert -112 < result.score.mean < -76 and not result.overflowed, policy


def test_damaged_defenders_are_refused(tmp_path):
    weights = random_weights()
    path = tmp_path / "defender.npz"
    with pytest.raises(ValueError, match="not the weights of a defender: it has the weights"):
        save_cage4_defender(path, {"host.weight": weights["host.weight"]})
    with pytest.raises(ValueError, match=r"act.bias is of shape \(3,\), expected \(4,\)"):
        save_cage4_defender(path, weights | {"act.bias": np.zeros(3)})
    for content in (b"", b"text", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no defender of CAGE Challenge 4"):
            Cage4Player(path)
    save_cage4_defender(path, weights)
    with np.load(path) as saved:
        np.savez(path, **{**saved, "facts": np.array("[]")})
    with pytest.raises(ValueError, match="is no defender of CAGE Challenge 4: its facts"):
        Cage4Player(path)
    np.savez(path, facts=np.array([{}]), **{"weights.act.bias": np.zeros(3)})
    with pytest.raises(ValueError, match="is no defender of CAGE Challenge 4"):
        Cage4Player(path)


def test_an_episode_becomes_pictures():
    options = {"steps": 25, "phishing_rate": 0.5, "render_mode": "rgb_array"}
    with seated("decoy-restore", **options) as seat:
        frames = [seat.envs.render()[0] for _ in seat.play(0)]
    assert len(frames) == 25 and frames[0].dtype == np.uint8
    assert frames[0].shape == (640, 1000, 3) and (frames[0] != frames[-1]).any()


def test_a_policy_may_have_an_observation_of_its_own():
    def act(observations, masks):
        act.observation = observations[0]
        return np.tile(codes.SLEEPS, (len(observations[0]), 1))

    act.observation = np.zeros(3)
    assert evaluate_cage4(act, episodes=2, steps=5).episodes == 2


def test_what_a_policy_is_given_is_its_own_to_keep():
    kept = []

    def act(observations, masks):
        given = [*observations, *masks]
        kept.append((given, [array.copy() for array in given]))
        return np.random.default_rng(len(kept)).integers(0, 82, (2, 5))

    evaluate_cage4(act, episodes=2, steps=20)
    assert len(kept) == 19
    assert len({copies[0].tobytes() for _, copies in kept}) > 1
    for given, copies in kept:
        for array, copy in zip(given, copies, strict=True):
            np.testing.assert_array_equal(array, copy)


def test_the_score_without_the_contractor_leaves_out_the_impacts_there():
    with seated("sleep", 4, steps=80) as seat:
        steps = itertools.islice(seat.play(5), 1, None)
        there = np.array([seat.envs.zone_rewards()[:, codes.CON, 2] for _ in steps])
    assert there.any() and not there[:, 0].all()
    result = evaluate_cage4("sleep", episodes=4, seed=5, steps=80)
    apart = result.score.mean - result.score_without_contractor.mean
    assert apart == pytest.approx(there[:-1].sum(axis=0).mean())
    assert f"{result.score_without_contractor.mean:.1f}" in str(result)
