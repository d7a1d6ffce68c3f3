"""Metrics: each declared once (declaration, overlay), published under known keys (outputs), computed in one place."""

from tinsmith.actors.metrics.catalogue import Catalogue, Reduced
from tinsmith.actors.metrics.rows import rows_in_order

__all__ = ["Catalogue", "Reduced", "rows_in_order"]
