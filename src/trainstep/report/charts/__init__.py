"""The page's charts of one subject each."""
