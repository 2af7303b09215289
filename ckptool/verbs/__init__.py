"""One file per verb: open, transform, save or report. What both faces call, the command line and the library.

A verb is a function of the name of its command. Those that write take the options of `saving.SaveOptions` and return `Written`.
"""
