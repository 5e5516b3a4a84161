"""The golden corpus: problems whose answers every change of planning is compared with."""
