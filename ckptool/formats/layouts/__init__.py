"""The folders of engines: one file a layout, which says what pieces there are; `folder` and `pieces` do the rest."""
