"""report.html on a desk's screen."""

import pytest
from browser.test_report_file import (
    report_tab,
    tab,
    test_each_picture_can_be_seen_and_its_words_read,
    test_it_can_be_read_by_everybody_everywhere,
    test_on_paper_pictures_are_dark_on_white,
    test_tables_scroll_in_boxes_that_show_it,
    test_the_numbers_behind_a_picture_are_reached_by_the_keyboard,
)
from support.browser import LOOKS, Look


@pytest.fixture
def look() -> Look:
    return LOOKS[0]
