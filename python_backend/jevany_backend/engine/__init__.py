"""The forward pass: from a row of token ids to the hidden states that are read."""
