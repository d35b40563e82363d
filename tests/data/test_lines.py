"""Lines of users' texts: where they end, and in which encoding they are."""

from __future__ import annotations

import pytest

from ephemeron.data.formats.lines import text_lines
from ephemeron.errors import JobError


def test_only_line_feeds_end_lines():
    text = "\ufeffa\u2028b\u2029c\x85d\x0b\x0c\x1c\re\r\n\n  \nf\r"
    assert text_lines(text.encode(), "t") == [(1, "a\u2028b\u2029c\x85d\x0b\x0c\x1c\re"), (4, "f")]
    assert text_lines(b"", "t") == []


@pytest.mark.parametrize("name", ["UTF-16", "UTF-32"])
def test_other_encodings_are_refused_with_a_remedy(name):
    for order in ("LE", "BE"):
        data = "\ufeffa\n".encode(f"{name}-{order}")
        with pytest.raises(JobError, match=f"t is {name}, and only UTF-8 is read; iconv -f {name} -t UTF-8"):
            text_lines(data, "t")
    with pytest.raises(JobError, match=r"t, line 2 is not UTF-8: .* at byte 3; convert it"):
        text_lines("a\ncaf\xe9\n".encode("latin-1"), "t")
