"""Linear attention: layers whose memory of the text is a state of fixed size (gated delta net)."""
