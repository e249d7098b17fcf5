"""What is particular to devices other than the processor: copies to them, their memory and their settings."""
