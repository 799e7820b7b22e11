"""Text -> tokens -> batch."""
