"""Two small trained decision models: their data, their tokenizer, their training and their evaluation."""
