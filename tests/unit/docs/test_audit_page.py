"""Every action of the audit log is on the page that describes it."""

from __future__ import annotations

import re

from ratchet_contract.api.audit import AuditAction
from tests.support.docs import ROOT


def test_page_on_security_names_all_actions_and_no_others() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    (actions,) = re.findall(r"^- the action: (.*?);$", page, re.MULTILINE | re.DOTALL)
    assert re.findall("`(.*?)`", actions) == list(AuditAction)
