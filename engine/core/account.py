"""What a tenant was served and what it holds. Pure data; engine/core/fairness.py says what it is for. Engine thread."""

from __future__ import annotations


class Account:
    """One tenant's, where the policy tells tenants apart; else everybody shares one."""

    __slots__ = ("num_running", "served", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.served = 0.0  # the virtual token counter: costs of what was served, divided by the weight
        self.num_running = 0

    @property
    def share(self) -> float:
        """How much of the batch it holds."""
        return self.num_running / self.weight

    def charge(self, cost: float) -> None:
        """It has been served."""
        self.served += cost / self.weight
