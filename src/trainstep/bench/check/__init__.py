"""What a right result is, and by how much a computation may be off before it is shown no speed."""
