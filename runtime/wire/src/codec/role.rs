//! The part that a frame plays, and the version of its layout.

/// The version of the frame layout. Both sides of a connection must use the same one.
pub const PROTOCOL_VERSION: u16 = 1;

/// The part a frame plays in the exchange between two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FrameRole {
    Request = 1,
    Reply = 2,
    /// A reply that carries a [`crate::Refusal`] in the structured part.
    Refusal = 3,
    /// The last frame before a side closes the connection; carries the reason as a refusal.
    Goodbye = 4,
    /// The first frame of a connection that is meant for one incarnation of a process. Its number
    /// is the request id, and that process sends the frame back.
    Greeting = 5,
}

impl FrameRole {
    pub(super) fn from_number(number: u16) -> Option<Self> {
        let all = [Self::Request, Self::Reply, Self::Refusal, Self::Goodbye, Self::Greeting];
        all.into_iter().find(|role| *role as u16 == number)
    }
}
