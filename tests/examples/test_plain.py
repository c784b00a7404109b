"""The examples in plain PyTorch: they run with small numbers, stand alone, and (slow) learn."""

import ast

import pytest
from example_files import EXAMPLES, load_example

from vecenv.learn import EvaluationResult, evaluate

SMALL = {
    "ppo": {"total_steps": 4_000},
    "dqn": {"total_steps": 1_200},
    "sac": {"total_steps": 1_080},
    "ppo_recurrent": {"total_steps": 4_000},
    "ppo_agents": {"total_steps": 7_000},
    "own_env": {"total_steps": 3_000},
    "cage2": {"total_steps": 13_000},
    "offline": {"num_updates": 20, "num_episodes": 8},
}
SCORES = {  # as the examples state them, with some room
    "ppo": 475,
    "dqn": 450,
    "sac": -180,
    "ppo_recurrent": 475,
    "ppo_agents": -65,
    "own_env": 0.97,
    "cage2": -18,
    "offline": -180,
}


def options_of(module, folder, **given):
    fields = module.Options.__dataclass_fields__
    return module.Options(**given, **({"save": folder} if "save" in fields else {}))


def results_of(found):
    return list(found.values()) if isinstance(found, dict) else [found]


def test_examples_stand_alone():
    files = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(SMALL) < set(files)
    for name, text in files.items():
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        own = {module.partition(".")[0] for module in imported} & set(files)
        assert not own - {"resource"}, f"{name}.py imports {own}"


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", SMALL)
def test_they_train_and_evaluate(name, tmp_path, capsys, monkeypatch):
    module = load_example(name)

    def evaluate_few(act, envs, _, seed):
        return evaluate(act, envs, 6, seed=seed)

    monkeypatch.setattr(module, "evaluate", evaluate_few)
    found = results_of(module.main(options_of(module, tmp_path / "run", **SMALL[name])))
    assert all(isinstance(result, EvaluationResult) for result in found)
    assert f"{found[-1].mean:.1f}" in capsys.readouterr().out or name == "own_env"


@pytest.mark.usefixtures("one_torch_thread")
def test_compiled_gradients_are_those_of_autograd(capsys):
    example = load_example("fast_gradient")
    found = example.main(example.Options(num_rows=64, repetitions=1))
    assert set(found) == {"autograd", "compiled", "compiled, two threads"}
    assert "autograd: autograd, 0.0" in capsys.readouterr().out


@pytest.mark.learn
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", SCORES)
def test_they_learn_what_they_say(name, tmp_path):
    module = load_example(name)
    found = results_of(module.main(options_of(module, tmp_path / "run")))
    assert found[-1].mean > SCORES[name]
