"""Pages of episodes of CAGE 2: what both sides did in each step, as text."""

from vecenv.cage.challenge2.playing import seated
from vecenv.page import EpisodePage, action_names, record


def test_a_page_tells_the_deeds_of_both_sides_and_what_came_of_them():
    page = EpisodePage("a game", {}, fps=2)
    options = {"red_agent": "b_line", "episode_length": 5, "render_mode": "rgb_array"}
    with seated("react-remove", **options) as seat:
        names, given = action_names(seat.envs, "Cage2-v0"), {"seed": 1, "num_steps": 5}
        look = seat.envs.render_env
        record(page, seat.envs, seat.act, names, look, tell=seat.tell, **given)
    text = page.to_html()
    assert '["red","DiscoverRemoteSystems User, succeeded"]' in text.replace('", "', '","')
    assert "Remove User4, succeeded" in text
