"""From data files to rows: read in bounded pieces, whatever they unpack to."""
