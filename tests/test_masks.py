"""Action masks: their forms, and errors for wrong ones; tests/test_backends.py has the rest."""

import functools

import numpy as np
import pytest
from choices import fast_are
from envs import CounterEnv
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from masked_envs import Minefield, kernels, mask_of

from vecenv import (
    ActionMaskError,
    AsyncVectorEnv,
    EnvCreationError,
    MaskInfos,
    NoActionMaskError,
    SlotError,
    SyncVectorEnv,
    VectorEnvCheckError,
    check_vector_env,
    make_vec,
    mask_width,
    sample_actions,
)
from vecenv.jit import JitVectorEnv


class Saying(CounterEnv):
    """Gives the masks of a script, one after the other; None for an info without one."""

    action_space = spaces.Discrete(3)

    def __init__(self, *script, **options):
        super().__init__(**options)
        self.script = [*script]

    def _with_mask(self, info):
        mask = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return info if mask is None else {**info, "action_mask": mask}

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs, self._with_mask(info)

    def step(self, action):
        *result, info = super().step(action)
        return (*result, self._with_mask(info))


def saying(*scripts, backend=SyncVectorEnv, **options):
    fns = [functools.partial(Saying, *script, length=9) for script in scripts]
    envs = backend(fns, **options)
    envs.reset(seed=1)
    return envs


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(4, np.int8), r"env 1: the action mask is of shape \(4,\), expected 3 times 0 or"),
        (
            np.ones((1, 3), np.int8),
            r"env 1: the action mask is of shape \(1, 3\), expected 3 times",
        ),
        (np.array([0, 2, 1]), "env 1: an action mask has 2, expected 0 .not allowed. or 1"),
        (np.array([0.5, 1, np.nan]), "env 1: an action mask has 0.5, expected 0"),
        (np.array(["a", "b", "c"]), "env 1: the action mask is ndarray array.*, expected 3 times"),
        ({0, 2}, r"env 1: the action mask is set \{0, 2\}, expected 3 times 0 or 1 for actions of"),
        ([1, None, 0], r"env 1: the action mask is list \[1, None, 0\], expected 3 times"),
        (np.zeros(3, np.int8), "the action mask of env 1 allows no action, though its episode"),
        (None, r"env 1 gave no infos\['action_mask'\] with its latest results, as it or other"),
    ],
)
def test_a_mask_that_fits_not_is_refused_by_whoever_asks_for_it(mask, message):
    """One clear sentence that names the env; envs that are not asked for masks step on."""
    for first in ([1, 0, 1], [0, 1, 1]):  # a list: each env's mask is an object, as are theirs
        try:
            envs = saying([first], [first, first, mask])
            envs.step([0, 0])
        except ValueError as error:
            pytest.fail(f"stepping does not look at masks: {error}")
        np.testing.assert_array_equal(envs.action_masks(), [first, first])
        envs.step([0, 0])
        with pytest.raises(ActionMaskError, match=message):
            envs.action_masks()
        assert envs.action_masks([0]).tolist() == [first]
        envs.step([0, 0])
        envs.close()


def test_wrong_arrays_of_all_envs_at_once():
    """Which come as one array rather than as objects."""
    for mask, message in [
        (np.ones(4, np.int8), r"env 0: the action mask is of shape \(4,\)"),
        (np.array([0, 2, 1]), "env 0: an action mask has 2"),
        (np.array([0, np.nan, 1]), "env 0: an action mask has nan"),
        (np.zeros(3, bool), "the action mask of env 0 allows no action"),
        ({"left": np.ones(3)}, "env 0: the action mask is dict"),
    ]:
        envs = saying([mask], [mask])
        with pytest.raises(ActionMaskError, match=message):
            envs.action_masks()
        envs.close()


def test_a_part_of_an_action_without_a_value_allows_no_action(monkeypatch):
    monkeypatch.setattr(Saying, "action_space", spaces.MultiDiscrete([2, 3]))
    good, bad = np.array([0, 1, 1, 0, 0], np.int8), np.array([0, 0, 1, 1, 1], np.int8)
    envs = saying([good], [bad])
    assert envs.action_masks([0]).tolist() == [good.tolist()]
    with pytest.raises(ActionMaskError, match="the action mask of env 1 allows no action, though"):
        envs.action_masks()
    envs.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("last", [None, np.zeros(3, np.int8), np.ones(7, np.int8)])
def test_where_an_episode_is_over_any_mask_will_do(mode, last):
    """The action that follows is ignored, or not allowed at all; policies need some choice."""
    script = [[1, 0, 1], [1, 0, 0], last, [0, 1, 0]]
    fns = [functools.partial(Saying, *script, length=2)] * 2
    envs = SyncVectorEnv(fns, autoreset_mode=mode)
    envs.reset()
    envs.step([0, 0])
    assert envs.action_masks().tolist() == [[1, 0, 0]] * 2
    assert envs.step([0, 0])[2].all()
    assert envs.action_masks().tolist() == [[1, 1, 1]] * 2
    if mode == "Disabled":
        envs.reset(options={"reset_mask": np.array([False, True])})
        assert envs.action_masks().tolist() == [[1, 1, 1], [0, 1, 0]]
    else:
        envs.step([0, 0])
        assert envs.action_masks().tolist() == [[0, 1, 0]] * 2
    envs.close()
    env = MaskInfos(Saying([1, 0, 1], last, length=1))
    env.reset()
    if last is not None:
        assert env.step(0)[2], "an end is reported whatever mask there is"


# -- who gives them -------------------------------------------------------------------------------


def test_envs_without_masks_are_told_what_is_missing():
    wanted = (
        r"the envs give no action masks; an env that has them returns info\['action_mask'\] from "
        r"reset and step, has a part 'action_mask' in its Dict observations, or has a method "
        r"action_masks\(\); each mask is an array of 10 times 0 or 1"
    )
    for envs in (SyncVectorEnv([CounterEnv] * 2), AsyncVectorEnv([CounterEnv] * 2, num_workers=1)):
        assert not envs.has_action_masks
        envs.reset()
        with pytest.raises(NoActionMaskError, match=wanted):
            envs.action_masks()
        envs.step([0, 0])
        envs.close()
    envs = make_vec("Pendulum-v1", 2, backend="sync")
    envs.reset()
    assert not envs.has_action_masks
    with pytest.raises(NoActionMaskError, match="only Discrete, MultiDiscrete and MultiBinary"):
        envs.action_masks()
    envs.close()
    wrapped = SyncVectorEnv([lambda: MaskInfos(CounterEnv())])
    with pytest.raises(NoActionMaskError, match=r"give no action masks; an env that has them"):
        wrapped.reset()
    with pytest.raises(EnvCreationError, match="only Discrete"):
        make_vec("Pendulum-v1", 2, backend="sync", mask_infos=True)
    with pytest.raises(NoActionMaskError, match="CartPole-v1 has no action_mask kernel; give its"):
        make_vec("JitCartPole-v1", 2, mask_infos=True)
    jit = make_vec("JitCartPole-v1", 2)
    jit.reset()
    with pytest.raises(NoActionMaskError, match="has no action_mask kernel"):
        jit.action_masks()


def test_other_things_of_the_name_are_no_masks():
    class Taxi(CounterEnv):
        def action_mask(self, state):
            raise AssertionError

    class Board(Minefield):
        observation_space = property(lambda self: self.space, lambda self, space: None)
        space = spaces.Dict(observation=spaces.Box(0, 1), action_mask=spaces.MultiBinary(4))

        def _result(self):
            return self.space.sample(), {}

    for env in (Taxi, Board):
        envs = SyncVectorEnv([env] * 2)
        envs.reset()
        with pytest.raises(NoActionMaskError, match="the envs give no action masks"):
            envs.action_masks()
        envs.close()


# -- the call -------------------------------------------------------------------------------------


def test_the_call_is_refused_like_any_other():
    for make in (
        lambda: SyncVectorEnv([Minefield] * 3),
        lambda: AsyncVectorEnv([Minefield] * 3, num_workers=2),
        lambda: JitVectorEnv(kernels(), 3),
    ):
        envs = make()
        with pytest.raises(ResetNeeded, match="`action_masks` was called before the first"):
            envs.action_masks()
        envs.reset(seed=1)
        actions = sample_actions(
            envs.single_action_space, envs.action_masks(), np.random.default_rng(1)
        )
        envs.send(actions[[2]], [2])
        with pytest.raises(AlreadyPendingCallError, match="`action_masks` while 1 envs are in fli"):
            envs.action_masks()
        with pytest.raises(AlreadyPendingCallError, match="`action_masks` for env 2, which is in"):
            envs.action_masks([0, 2])
        assert envs.action_masks([1, 0]).shape == (2, 5)
        envs.recv()
        with pytest.raises(ValueError, match="env_ids has 3, expected ids from 0 to 2"):
            envs.action_masks([3])
        for out in (np.zeros((3, 4), np.int8), np.zeros((3, 5)), [[0] * 5] * 3):
            with pytest.raises(SlotError, match=r"out\.masks"):
                envs.action_masks(out=out)
        into = np.zeros((2, 5), bool)
        assert envs.action_masks([2, 1], out=into) is into
        np.testing.assert_array_equal(into, envs.action_masks()[[2, 1]])
        envs.close()
        with pytest.raises(ClosedEnvironmentError):
            envs.action_masks()


def test_envs_that_have_to_be_asked_can_not_be_while_others_are_in_flight():
    envs = SyncVectorEnv([functools.partial(Minefield, "action_masks")] * 3)
    envs.reset(seed=1)
    envs.action_masks()
    envs.send([2], [2])
    with pytest.raises(AlreadyPendingCallError, match=r"wrap each env in vecenv\.MaskInfos"):
        envs.action_masks([0])
    envs.close()


# -- compiled envs --------------------------------------------------------------------------------


def test_a_kernel_that_allows_nothing_of_a_part_is_told_while_the_episode_goes_on():
    envs = JitVectorEnv(kernels(parts=True), 3, debug=True)
    envs.reset(seed=1)
    envs.states.key[1:] = 0b00011  # no value of the second part
    with pytest.raises(ActionMaskError, match="the action mask of env 1 allows no action, though"):
        envs.action_masks()
    with pytest.raises(ActionMaskError, match="the action mask of env 2 allows no action, though"):
        envs.action_masks([0, 2])
    masks = envs.action_masks([0])
    assert masks[0, :2].any() and masks[0, 2:].any() and not masks.all()
    envs._runs["episode_over"][1:] = True  # whose next step only resets
    assert envs.action_masks([2, 1]).all()


def test_masks_of_compiled_envs_are_in_infos_only_when_asked_for():
    envs = JitVectorEnv(kernels(), 3)
    assert envs.reset(seed=1)[1] == {}
    assert envs.step([2, 2, 2])[4] == {}
    debugged = JitVectorEnv(kernels(), 3, mask_infos=True, debug=True)
    obs, infos = debugged.reset(seed=1)
    np.testing.assert_array_equal(infos["action_mask"], mask_of(obs[:, 0]))


@pytest.mark.parametrize(
    "form", fast_are(["info", "tuple"], ["info", "tuple", "obs", "action_masks"])
)
def test_masks_are_a_part_of_the_state(form):
    """Also those of episodes that have just ended; either backend loads the other's."""
    fns = [functools.partial(Minefield, form, parts=True)] * 3
    rng = np.random.default_rng(1)
    envs, other = SyncVectorEnv(fns), AsyncVectorEnv(fns, num_workers=2)
    envs.reset(seed=1)
    for count in (0, 3, 4):
        for _ in range(count):
            actions = sample_actions(envs.single_action_space, envs.action_masks(), rng)
            ended = envs.step(actions)[3]
        other.load_state_dict(envs.state_dict())
        np.testing.assert_array_equal(other.action_masks(), envs.action_masks())
    assert ended.all()
    fresh = SyncVectorEnv(fns)
    fresh.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(fresh.action_masks(), np.ones((3, 5)))
    if form == "info":
        other.step(sample_actions(envs.single_action_space, other.action_masks(), rng))
    for each in (envs, other, fresh):
        each.close()


# -- the checker ----------------------------------------------------------------------------------


class Muddled(SyncVectorEnv):
    """Returns the masks of other envs, of an earlier step, or of another kind."""

    def __init__(self, fns, muddle):
        super().__init__(fns, autoreset_mode="SameStep")
        self.muddle = muddle

    def action_masks(self, env_ids=None, *, out=None):
        return self.muddle(super().action_masks(env_ids, out=out))


class Hopeless(Minefield):
    """Allows nothing at its fourth step."""

    def _draw(self):
        super()._draw()
        self.key *= self.step_number != 4


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Muddled([Minefield] * 3, lambda masks: masks[::-1]), r"infos\['action_mask'\] is"),
        (lambda: Muddled([Minefield] * 3, lambda masks: masks * 3), "returns int8 0 and 1, a row"),
        (lambda: Muddled([Minefield] * 3, lambda masks: masks[:, :4]), "returns int8 0 and 1, a"),
        (lambda: SyncVectorEnv([Hopeless] * 3), "fit the action space, and allow an action"),
    ],
)
def test_the_checker_finds_wrong_masks(make, rule):
    with pytest.raises(VectorEnvCheckError, match=f"breaks a rule (?s:.*){rule}"):
        check_vector_env(make(), num_steps=20)


# -- drawing --------------------------------------------------------------------------------------


def test_widths_and_draws_of_every_space():
    """Each allowed action comes, no other does, and each as often."""
    rng = np.random.default_rng(0)
    for space, width in [
        (spaces.Discrete(4, start=-2), 4),
        (spaces.MultiDiscrete([2, 3, 4]), 9),
        (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [5, -5]]), 11),
        (spaces.MultiBinary(3), 6),
        (spaces.MultiBinary([2, 2]), 8),
    ]:
        assert mask_width(space) == width
        masks = np.repeat((rng.random((1, width)) < 0.5).astype(np.int8), 6000, axis=0)
        sizes = [space.n] if isinstance(space, spaces.Discrete) else None
        if sizes is None:
            sizes = getattr(space, "nvec", np.full(space.shape, 2)).reshape(-1)
        masks[:, np.cumsum(sizes) - 1] = 1
        actions = sample_actions(space, masks, rng)
        assert all(space.contains(action) for action in actions[:50])
        assert actions.dtype == space.dtype
        numbers = (actions - getattr(space, "start", 0)).reshape(len(actions), -1)
        first = 0
        for part, size in enumerate(sizes):
            counts = np.bincount(numbers[:, part], minlength=size)
            allowed = masks[0, first : first + size] == 1
            first += size
            assert (counts[~allowed] == 0).all()
            expected = len(actions) / allowed.sum()
            assert (abs(counts[allowed] - expected) < 5 * expected**0.5).all()
    with pytest.raises(ActionMaskError, match=r"masks has shape \(3, 2\), expected \(B, 4\)"):
        sample_actions(spaces.Discrete(4), np.ones((3, 2)), rng)
    with pytest.raises(NoActionMaskError, match="only Discrete"):
        mask_width(spaces.Box(0, 1))
