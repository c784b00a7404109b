"""What `make fuzz` finds in files that were changed."""

import pytest
from fuzz import files


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_check_that_is_left_out_is_found():
    # It shows as a crash, an error on use, or a refusal that comes too late: files are drawn.
    with pytest.raises(AssertionError, match=r"file \d+ \("):
        for number in range(5):
            files.run_case(number, 200, is_broken=True)
