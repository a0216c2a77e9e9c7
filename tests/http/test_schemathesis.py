"""Whatever can be made of /openapi.json, sense and nonsense, is answered as it says, and never by a failure of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Live
from hypothesis import HealthCheck, Phase, given, settings

if sys.version_info < (3, 11):
    pytest.skip("schemathesis needs Python 3.11", allow_module_level=True)

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.patience import PATIENCE_S

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 5  # of each operation, the same ones each time


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_operation_keeps_its_word(serve: Callable[..., Live], tmp_path: Path) -> None:
    live = serve(
        data_dir=tmp_path / "data", allow_runtime_lora_updating=True, role="prefill", kv_connector_dir=tmp_path / "kv"
    )  # whatever is off is answered with 501, a failure of ours to schemathesis
    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    answered = {status for operation in operations for status in statuses(operation)}
    assert {200, 400, 404} <= answered


def statuses(operation: Any) -> set[int]:
    """Try one operation; returns how it answered."""
    seen = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # a random one would end most requests before they begin
        seen.add(case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S).status_code)

    run()
    return seen
