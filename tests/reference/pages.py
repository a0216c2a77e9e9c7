"""Collects the pages of the reference: file name -> text."""

from __future__ import annotations

from server.app import routers
from server.http.openapi import describe
from tests.reference.commands import commands_page
from tests.reference.errors import errors_page
from tests.reference.fields import FieldsPage, endpoints_page
from tests.reference.foreign import foreign_page
from tests.reference.headers import headers_page
from tests.reference.metrics import metrics_page
from tests.reference.settings import settings_section


def pages() -> dict[str, str]:
    """Return every page."""
    document = describe(routers())
    texts = {
        "settings.md": "\n".join(settings_section()),
        "api.md": endpoints_page(document),
        "fields.md": FieldsPage(document).render(),
        "answers.md": FieldsPage(document, of_answers=True).render(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "headers.md": headers_page(),
        "foreign-flags.md": foreign_page(),
        "cli.md": commands_page(),
    }
    return {name: text.rstrip() + "\n" for name, text in texts.items()}
