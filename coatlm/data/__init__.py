"""Text -> tokens -> microbatches."""
