//! Circles of a directed graph.

/// Finds the strongly connected components with more than one node, by Tarjan's algorithm.
///
/// `edges[node]` lists the nodes that `node` points to. Circles come largest first, and the nodes
/// of each in ascending order.
pub fn circles(edges: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut search = Search { edges, nodes: vec![Node::default(); edges.len()], ..Search::default() };
    for node in 0..edges.len() {
        if search.nodes[node].index.is_none() {
            search.visit(node);
        }
    }
    search.circles.sort_by_key(|circle| (std::cmp::Reverse(circle.len()), circle.first().copied()));
    search.circles
}

#[derive(Clone, Copy, Default)]
struct Node {
    /// The order of the first visit.
    index: Option<usize>,
    /// The smallest index that is reachable from here through nodes of the stack.
    low: usize,
    on_stack: bool,
}

#[derive(Default)]
struct Search<'a> {
    edges: &'a [Vec<usize>],
    nodes: Vec<Node>,
    stack: Vec<usize>,
    visited: usize,
    circles: Vec<Vec<usize>>,
}

impl Search<'_> {
    /// The recursion is as deep as the graph has nodes: a few hundred modules at most.
    fn visit(&mut self, node: usize) {
        let index = self.visited;
        self.visited += 1;
        self.nodes[node] = Node { index: Some(index), low: index, on_stack: true };
        self.stack.push(node);
        for &next in &self.edges[node] {
            match self.nodes[next].index {
                None => {
                    self.visit(next);
                    self.nodes[node].low = self.nodes[node].low.min(self.nodes[next].low);
                }
                Some(index) if self.nodes[next].on_stack => {
                    self.nodes[node].low = self.nodes[node].low.min(index);
                }
                Some(_) => {}
            }
        }
        if self.nodes[node].low == index {
            self.pop_component(node);
        }
    }

    fn pop_component(&mut self, root: usize) {
        let mut component = Vec::new();
        while let Some(node) = self.stack.pop() {
            self.nodes[node].on_stack = false;
            component.push(node);
            if node == root {
                break;
            }
        }
        if component.len() > 1 {
            component.sort_unstable();
            self.circles.push(component);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_no_circle() {
        assert_eq!(circles(&[vec![1, 2], vec![2], vec![]]), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn circles_are_separated_and_sorted_by_size() {
        let edges = [vec![1], vec![0, 2], vec![3], vec![4], vec![2], vec![5]];
        assert_eq!(circles(&edges), [vec![2, 3, 4], vec![0, 1]]);
    }
}
