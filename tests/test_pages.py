"""Reports as HTML: all within one file, and nothing of a name is taken for markup."""

from __future__ import annotations

import base64
import html.parser
import re

from test_report import full_report

from checkmate_tf.reports.report import Report

PNG = b"\x89PNG"


class Checker(html.parser.HTMLParser):
    """Collects tags and checks that each is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.references = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_a_report_is_one_file_with_its_plots(tmp_path):
    path = tmp_path / "folder" / "report.html"
    full_report().save_html(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "Training step within 400.00 MiB" in text
    references = checked(text).references
    assert len(references) == 4
    for reference in references:
        kind, data = reference.split(",", 1)
        assert kind == "data:image/png;base64", "nothing is fetched from elsewhere"
        assert base64.b64decode(data).startswith(PNG)


def test_a_notebook_shows_a_fragment_of_a_page():
    tags = checked(full_report()._repr_html_()).tags
    assert tags.count("img") == 4
    assert "html" not in tags


def test_a_notebook_shows_figures_that_pyplot_does_not_know():
    for name in ("memory", "schedule", "search", "sizes"):
        assert getattr(full_report(), f"plot_{name}")()._repr_png_().startswith(PNG)


def test_figures_and_facts_are_in_tables():
    text = re.sub(r"<[^>]*>", " ", full_report()._repr_html_())
    for shown in ("800.00 MiB", "390.00 MiB", "395.00 MiB", "1.050 x the plain step time", "0.92 %"):
        assert shown in text


def test_an_unplanned_step_has_a_page_without_plots():
    text = Report(notes=("It runs unplanned.",))._repr_html_()
    assert "img" not in checked(text).tags
    assert "It runs unplanned." in text


def test_html_is_escaped():
    shown = full_report(notes=("<script>",), strategy="a&b")._repr_html_()
    assert "conv&lt;1&gt;" in shown
    assert "a&amp;b" in shown
    assert "script" not in checked(shown).tags
