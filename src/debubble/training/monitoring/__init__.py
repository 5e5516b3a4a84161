"""Figures of a run while it continues: lines, metrics, its record, and the comparison with its plan."""
