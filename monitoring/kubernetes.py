"""Writes alerts.yml as an object for Prometheus's operator.

python monitoring/kubernetes.py > deploy/kubernetes/components/monitoring/alerts.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

HEAD = """\
# Generated from monitoring/alerts.yml by monitoring/kubernetes.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: { name: quire }
spec:
"""


def main() -> None:
    """Write the object to standard output."""
    lines = (Path(__file__).parent / "alerts.yml").read_text(encoding="utf-8").splitlines()
    body = [f"  {line}" if line else "" for line in lines if not line.startswith("#")]
    sys.stdout.write(HEAD + "\n".join(body) + "\n")


if __name__ == "__main__":
    main()
