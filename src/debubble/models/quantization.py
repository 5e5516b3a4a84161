"""The format of quantised weights, as costs count it and the runtime has it.

Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3: NormalFloat numbers of 4 bits, and a scale for every block.
"""

NF4_BLOCK = 64
"""Weights of a row that share a scale."""

NF4_BYTES = 0.5 + 4 / NF4_BLOCK
"""Bytes per weight: 4 bits, and its part of a scale in fp32."""
