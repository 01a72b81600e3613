"""The table of the store's keys has every key."""

from __future__ import annotations

import re

from lopa_dist.parallel import store_keys


def test_the_table_has_every_key_once() -> None:
    table = re.findall(r"^``(.+?)``  ", str(store_keys.__doc__), re.MULTILINE)
    keys = [value for name, value in vars(store_keys).items() if name.isupper()]
    assert sorted(re.sub("[A-Z]+", "{}", key) for key in table) == sorted(keys)
