"""Pages of episodes of CAGE 2: what both sides did in each step, as text."""

from vecenv.cage.challenge2.play.playing import record_episode
from vecenv.page.episode import EpisodePage


def test_a_page_tells_the_deeds_of_both_sides_and_what_came_of_them():
    page = EpisodePage("a game", {}, fps=2)
    record_episode(page, "react-remove", seed=1, red_agent="b_line", episode_length=5)
    text = page.to_html()
    assert '["red","DiscoverRemoteSystems User, succeeded"]' in text.replace('", "', '","')
    assert "Remove User4, succeeded" in text
