"""Chat templates: how a conversation becomes token ids, and which of them are trained. One module per format."""
