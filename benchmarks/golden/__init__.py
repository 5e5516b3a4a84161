"""The golden corpus: problems whose answers every change of planning is held against."""
