"""What tests look for in a page: that it is one file, and what it says."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

LOADING = {"src", "href", "data", "poster", "srcset", "action", "xlink:href"}  # attributes that name another file


class Page(HTMLParser):
    """A page, read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.titles: list[str] = []  # of the points and bars of charts
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "title":
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            assert "url(" not in data
            assert "@import" not in data
        elif self._open and self._open[-1] == "title":
            self.titles[-1] += data
        else:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def needs_nothing(self) -> bool:
        """Whether the page loads no other file."""
        named = [attribute for _, attributes in self.tags for attribute in attributes if attribute in LOADING]
        return not named and not self.count("link") and not self.count("img") and not self.count("iframe")
