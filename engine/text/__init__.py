"""Text around the tokens: encoding, chat templates, thoughts, stop strings, repetition."""
